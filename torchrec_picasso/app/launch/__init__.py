"""Ranks of this machine as processes, and progress output."""
