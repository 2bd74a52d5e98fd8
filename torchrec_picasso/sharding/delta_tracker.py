"""Reports the looked-up hot/cold rows to TorchRec's model delta tracker, on each home rank.

Stock row-wise sharding calls the tracker with the ids that arrive at a rank's shard: rows of that
shard, counted from its first row. The home rank of a hot/cold row gets the same information from
the exchange of ids (rows that ranks request) and from the header (hot rows that any rank uses). It
writes each row once per batch into the tracker's store, under its table, before the batch's update,
for any number of micro-batches.

A table that shares a feature with another table is refused: TorchRec files the ids of stock tables
under features, so it would file both tables' rows under the first one.

Cost:
    Per pack one sort of the requested rows, and two host syncs on CUDA; nothing if no tracker is
    registered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode

from torchrec_picasso.errors import CompatError
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.rows.batch_rows import MicroBatchRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.storage.torchrec_kernel import HotColdKernel

RecordLookup = Callable[..., None]
"""The bound method ``ModelDeltaTrackerTrec.record_lookup`` of a tracker."""


def step_trackers(model: nn.Module) -> None:
    """Starts a new batch in all delta trackers of the model that is passed to a pipeline.

    ``DistributedModelParallel`` does this in its forward. A pipeline that computes embeddings ahead
    of the forward calls this function first. Batch numbers need not be consecutive.
    """
    for tracker in getattr(model, "model_trackers", {}).values():
        tracker.step()


def row_tracker(
    record: RecordLookup, group: RowGroup, kernels: Sequence[HotColdKernel]
) -> Callable[[MicroBatchRows], None]:
    """Makes the function that tracks the rows of a batch, and ignores its further micro-batches.

    The kernels are TorchRec's of the hot/cold tables in ``group``, with the rows that this rank
    owns. Raises CompatError if ``record`` is not a method of TorchRec's delta tracker, tables share
    a feature, or the optimizer has no state of the tracked kind.
    """
    if getattr(record, "__func__", None) is not ModelDeltaTrackerTrec.record_lookup:
        raise CompatError(
            f"hot/cold tables do not support a tracker function of one's own, got {record}: ids "
            "and outputs are not at a table's home as TorchRec's are; use "
            "DistributedModelParallel.init_torchrec_delta_tracker, or place these tables without "
            "HotColdParams"
        )
    tracker: Any = record.__self__  # type: ignore[attr-defined]
    path_of = _tracked_paths(tracker, group.tables)
    if tracker._mode not in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING):
        _refuse_other_states(tracker._mode, group)
        # TorchRec's reads the state from TBEs, which hold home rows and replicas here
        tracker.get_latest = partial(_latest_state, tracker)

    @torch.no_grad()
    def record_at_home(own: MicroBatchRows) -> None:
        if own.module in own.batch_rows.tracked:  # by an earlier micro-batch
            return
        own.batch_rows.tracked.add(own.module)
        for kernel in kernels:
            rows_by_table = kernel.split_rows(own.batch_rows.looked_up(kernel.rows))
            values_by_table = _values_by_table(tracker._mode, kernel)
            for (name, rows), values in zip(rows_by_table.items(), values_by_table):
                if name in path_of:
                    found = None if values is None else _tracked(tracker._mode, values[rows])
                    tracker.store.append(tracker.curr_batch_idx, path_of[name], rows, found)

    return record_at_home


def lookup_tracker(
    record: RecordLookup, group: RowGroup, kernels: Sequence[HotColdKernel]
) -> RecordLookup:
    """Extends ``record``, which gets stock tables' ids and outputs, by :func:`row_tracker`."""
    record_at_home = row_tracker(record, group, kernels)

    def record_lookup(features: Any, found: Any, *rest: Any) -> None:
        if isinstance(found, MicroBatchRows):
            record_at_home(found)
        else:
            record(features, found, *rest)

    return record_lookup


def _values_by_table(mode: TrackingMode, kernel: HotColdKernel) -> Iterable[Tensor | None]:
    """Values of all home rows of each table; ``None`` if a mode tracks row numbers alone."""
    if mode == TrackingMode.ID_ONLY:
        return [None] * len(kernel.table_names)
    kernel.flush()
    if mode == TrackingMode.EMBEDDING:
        return kernel.split_embedding_weights()
    return kernel.split_first_state()


def _tracked(mode: TrackingMode, values: Tensor) -> Tensor:
    """Values of looked-up rows that a mode tracks: weights in float32, norms of state, or state."""
    if mode == TrackingMode.EMBEDDING:
        return values.float()
    return values.norm(dim=1) if mode == TrackingMode.MOMENTUM_LAST else values


def _tracked_paths(tracker: Any, tables: Sequence[PackedTable]) -> Mapping[str, str]:
    """Maps each table that the tracker does not skip to its path in the model."""
    features_of = tracker.fqn_to_feature_names()
    # features_of: table's path -> features; a feature listed twice belongs to two tables
    num_tables = Counter(name for names in features_of.values() for name in set(names))
    for table in tables:
        shared = [name for name in table.feature_names if num_tables[name] > 1]
        if shared:
            raise CompatError(
                f"the delta tracker cannot track hot/cold table {table.name!r}: it files rows "
                f"under features, and another table has its feature {shared[0]!r} too; give each "
                "table features of its own, or skip the module with fqns_to_skip"
            )
    return {name: path for name, path in tracker.table_to_fqn.items() if path in features_of}


def _refuse_other_states(mode: TrackingMode, group: RowGroup) -> None:
    """Refuses a tracking mode whose optimizer state these tables' optimizer does not have."""
    is_elementwise = mode == TrackingMode.MOMENTUM_LAST
    expected = "of one number per row, as row-wise Adagrad has"
    if is_elementwise:
        expected = "of the shape of the weights, as Adagrad has"
    packs = [(route, *pack) for route in group.routes for pack in enumerate(route.storages)]
    for route, pack, storage in packs:
        state = next(iter(storage.tables.row_states.values()), None)
        # state of the shape of the weights has two dimensions (rows, D), row-wise state one
        if state is None or (state.homes.dim() == 2) != is_elementwise:
            names = [table.name for table in route.tables if table.pack == pack]
            raise CompatError(
                f"the delta tracker's mode {mode.name} reads an optimizer state {expected}; the "
                f"optimizer of hot/cold tables {', '.join(map(repr, names))} has none. Track with "
                "ID_ONLY, or change the optimizer"
            )


def _latest_state(tracker: Any) -> dict[str, Tensor]:
    """Reads the optimizer state of all tracked tables of this rank; replaces ``get_latest``."""
    latest = {}
    lookups = [lookup for module in tracker.tracked_modules.values() for lookup in module._lookups]
    for lookup in lookups:
        if isinstance(lookup, DistributedDataParallel):
            continue
        for kernel in lookup._emb_modules:
            if isinstance(kernel, HotColdKernel):
                kernel.flush()
                states = list(kernel.split_first_state())
            else:
                states = [state for state, *_ in kernel.emb_module.split_optimizer_states()]
            for table, state in zip(kernel.config.embedding_tables, states):
                latest[tracker.table_to_fqn[table.name]] = state
    return latest
