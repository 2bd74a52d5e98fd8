"""The pipeline: overlaps the exchanges of three batches, or of micro-batches, with compute.

- ``interleaved`` is the user's class (``options``, ``lifecycle``). Its ``steps`` are of two kinds:
  ``interleaved_steps`` and, without hot/cold tables, ``stock_steps``.
- The model: ``pipelined_model`` replaces the forwards of its sharded modules (``model_parts``,
  ``rewrite``); those of a ``module_group`` share an exchange (``variable_batch``). ``made_ahead``
  and ``input_slice`` make inputs that the model makes itself; ``batch_watch`` finds its writes.
- A step: ``batch_queue``, ``in_flight_batch``, ``operations``, ``losses``, ``full_batch_output``;
  ``data_parallel`` and ``dense_average`` are the dense weights', ``hot_sets`` the hot rows'.
- Micro-batches: ``micro_batch_policy`` decides by ``cut_check``; ``equal_rows`` counts.
- For the user: ``preparation`` reads ids in a data loader, ``step_report`` reports.
"""
