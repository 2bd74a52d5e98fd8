"""The operations of a step as data, and which of its settings is the fastest."""
