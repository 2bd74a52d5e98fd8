"""Proves that a model may train in micro-batches, by following its operators."""
