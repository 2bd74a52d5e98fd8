"""Checkpoints of a run: written completely or not at all, loaded by any plan."""
