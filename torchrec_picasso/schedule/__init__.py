"""The operations of a step as data, and the choice of the fastest setting."""
