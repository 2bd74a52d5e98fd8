"""Shows whether a model may train in micro-batches: by its operators, or by a comparison.

``proof`` runs the forward on ``inputs`` without data: ``follow`` derives a value (``values``) of
each operator's output by the rules of ``rules`` and ``places`` (``call``), ``watch`` sees the
Python code in between. ``guard`` keeps the state that the proof depends on (``content``,
``dense_part``). ``comparison`` is for models without a proof (``train_pipeline/cut_check.py``).
"""
