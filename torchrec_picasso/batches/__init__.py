"""Splits a batch into parts by samples, and joins a model's outputs for them."""
