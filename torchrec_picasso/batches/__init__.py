"""Fetches batches, splits them into micro-batches by samples, and joins a model's outputs."""
