"""Splits a batch into micro-batches by samples, and joins a model's outputs for them."""
