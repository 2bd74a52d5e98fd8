"""TorchRec's contract: an EmbeddingSharding, the sharded modules that use it, and their sharders.

A batch passes ``in_backward`` (ids out, then rows out), ``output_dist`` (rows in, pooled; in
backward, gradients out), and ``in_backward`` again (gradients in, one update). ``sharder`` is what
a user passes to TorchRec; it makes ``sharded_ebc`` and ``sharded_ec`` (``sharded_module``), which
make one ``table_sharding``. ``delta_tracker`` reports rows to TorchRec's trackers.
"""
