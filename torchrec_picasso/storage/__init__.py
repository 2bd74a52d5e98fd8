"""Storage of rows on a rank: home rows, replicas, and the single update per row and step.

``row_storage`` is one pack, over the FBGEMM tables of ``row_tables`` and the CPU optimizers of
``row_updates``; ``exactness`` refuses settings, ``row_uses`` counts accesses, ``torchrec_kernel``
is the pack's interface to TorchRec.
"""
