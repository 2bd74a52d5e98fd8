"""Brings batches to a pipeline, the same number on all ranks, on streams of their own."""
