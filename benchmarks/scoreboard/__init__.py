"""All models of the zoo against stock TorchRec: a line each, those that lose too.

``entries`` says what each trains, ``board`` reads what was measured. Models, batches,
turns, plans and predictions are those of :mod:`benchmarks.fields`.
"""
