"""The rows of one batch, from its features to the update of its rows; independent of module kinds.

A driver decides when each operation runs: TorchRec's forward and the engine's backward
(``sharding/in_backward.py``), or a schedule (``train_pipeline/``).
"""
