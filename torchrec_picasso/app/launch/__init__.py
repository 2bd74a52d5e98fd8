"""Ranks of this machine as processes, and what a program says while they run."""
