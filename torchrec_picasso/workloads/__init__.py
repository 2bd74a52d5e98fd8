"""Models, data sets and the rank launcher of the command line, the tests and the benchmarks."""
