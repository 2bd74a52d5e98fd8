"""Cuts a batch into parts by samples, and joins what a model gave for them."""
