"""Fetches batches, with the ids that a data loader may have read (``feed``), splits them into
micro-batches by samples (``split``), and joins a model's outputs (``join``); ``members`` takes
containers apart.
"""
