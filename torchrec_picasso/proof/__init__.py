"""Whether a model may be cut into micro-batches: proved by following its operators."""
