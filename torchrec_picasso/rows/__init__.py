"""The rows of one batch, from its features to the update of its rows; independent of module kinds.

A batch passes the files in this order: ``valid_features``, ``request`` (which gives its
layout), ``batch_rows``, ``batch_gradients``; ``group`` holds what outlives a batch. What differs
between kinds of tables is a route: ``route`` has its methods, ``row_route``, ``node_route`` and
``pooled_route`` are the three. Between batches ``refresher`` changes which rows are hot, by access
counts (``hot_rows``) and intervals (``refresh_policy``).

A driver decides when each operation runs: TorchRec's forward and the engine's backward
(``sharding/in_backward.py``), or a schedule (``train_pipeline/``). Operations marked as collective
must run on all ranks in the same order. An argument ``wave`` selects the packs of that wave, no
packs if the module has fewer waves; ``None`` = all packs.
"""
