"""Whole runs: train, compare, probe."""
