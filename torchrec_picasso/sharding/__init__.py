"""TorchRec's contract: an EmbeddingSharding, the sharded modules that use it, and their sharders.

A batch passes ``in_backward`` (ids out, then rows out), ``output_dist`` (rows in, pooled; in
backward, gradients out), and ``in_backward`` again (gradients in, one update).
"""
