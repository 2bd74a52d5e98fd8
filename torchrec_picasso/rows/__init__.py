"""One batch's life, from its features to the update of its rows; knows no kind of module.

What drives it decides when each piece runs: TorchRec's forward and the engine's backward
(``sharding/in_backward.py``), or a schedule (``train_pipeline/``).
"""
