"""Whole runs: train, compare, probe.

- ``train`` runs a ``trainer`` (``placements``, ``pipelines``), with ``evaluate``, ``watching``,
  ``tensorboard_reports`` and ``profiling``; ``quality`` trains both models of a check.
- ``compare`` trains stock and ours in turns; ``wire_meter`` counts bytes of any sharding type.
- ``local_probe``, ``dense_probe`` and ``step_probe`` time the local work for the cost model, the
  first of an ``exchange_step``; ``pace`` sees other programs.
"""
