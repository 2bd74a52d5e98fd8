"""Fetches batches (``feed``), splits them into micro-batches by samples (``split``), and joins a
model's outputs (``join``); ``members`` takes containers apart. A batch may come with ids that a data
loader has read (``feed``).
"""
