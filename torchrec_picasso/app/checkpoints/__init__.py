"""Checkpoints of a run on the disk: whole ones or none, read back by any plan."""
