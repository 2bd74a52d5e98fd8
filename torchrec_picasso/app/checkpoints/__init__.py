"""Checkpoints of a run: written completely or not at all, loaded by any plan.

``writer`` runs ``write`` in a ``folder`` (``sums``, ``retention``), ``load`` reads it back
(``safe_reader``, ``plain_file``); ``hot_rows`` and ``setting`` lie beside the state.
"""
