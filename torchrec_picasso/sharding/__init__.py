"""TorchRec's contract: an EmbeddingSharding, the sharded modules that use it, and their sharders.

A batch passes the files in this order: ``in_backward`` (ids out), ``lookup`` (rows out),
``output_dist`` (rows in, pooled; in backward, gradients out), ``in_backward`` again (gradients in,
one update).
"""
