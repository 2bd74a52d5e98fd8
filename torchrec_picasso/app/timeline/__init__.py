"""When the operations of interleaved steps ran, read from a profile and drawn."""
