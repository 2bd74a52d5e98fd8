"""All models of the zoo against stock TorchRec: a line each, those that lose too.

``entries`` says what each trains, ``workload`` makes contestants' batches of it, ``board`` reads
what was measured and draws it. Turns, plans and predictions are those of :mod:`benchmarks.fields`.
"""
