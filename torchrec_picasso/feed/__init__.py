"""Feeds batches to a pipeline, the same number on all ranks, on separate streams."""
