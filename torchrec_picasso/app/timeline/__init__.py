"""Timelines of interleaved steps, read from a profile and drawn."""
