"""Shows whether a model may train in micro-batches: by its operators, or by a comparison."""
