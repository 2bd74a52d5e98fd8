"""Models, data sets and the rank launcher that the command line, tests and benchmarks train with."""
