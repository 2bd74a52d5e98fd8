"""The rows of one batch, from its features to the update of its rows; independent of module kinds.

A batch passes the files in this order: ``valid_features``, ``request`` (which gives its
layout), ``batch_rows``, ``batch_gradients``; ``group`` holds what outlives a batch. Between
batches ``refresher`` changes which rows are hot, by access counts (``hot_rows``).

A driver decides when each operation runs: TorchRec's forward and the engine's backward
(``sharding/in_backward.py``), or a schedule (``train_pipeline/``). Operations marked as collective
must run on all ranks in the same order. An argument ``wave`` selects the packs of that wave, no
packs if the module has fewer waves; ``None`` = all packs.
"""
