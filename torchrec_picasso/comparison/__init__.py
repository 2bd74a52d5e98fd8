"""Compares two ways of running a model, with random layers made deterministic."""
