"""Layers that the published models are built of: plain modules, one idea per file."""
