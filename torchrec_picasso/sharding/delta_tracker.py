"""Reports the looked-up hot/cold rows to TorchRec's model delta tracker, on each home rank.

Stock row-wise sharding calls the tracker with the ids that arrive at a rank's shard: rows of that
shard, counted from its first row. The home rank of a hot/cold row gets the same information from
the exchange of ids (rows that ranks request) and from the header (hot rows that any rank uses). The
tracker records each row once per batch, before the batch's update, for any number of micro-batches.

The tracker files rows under features, an home rank knows tables. Each table's rows are therefore
filed under the table's first feature. A table that shares a feature with another table is refused:
TorchRec would file both tables' rows under the first table, for stock tables too.

Cost:
    Per pack one sort of the requested rows, and two host syncs on CUDA; nothing if no tracker is
    registered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.rows.batch_rows import PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.storage.torchrec_kernel import HotColdKernel

__all__ = ["RecordLookup", "begin_batch", "lookup_tracker", "state_tracker"]

RecordLookup = Callable[..., None]
"""The bound method ``ModelDeltaTrackerTrec.record_lookup`` of a tracker."""


def begin_batch(model: nn.Module) -> None:
    """Starts a new batch in all trackers of the model that is passed to a pipeline.

    ``DistributedModelParallel`` does this in its forward. A pipeline that computes embeddings ahead
    of the forward calls this function first. Batch numbers need not be consecutive.
    """
    for tracker in getattr(model, "model_trackers", {}).values():
        tracker.step()


def lookup_tracker(
    record: RecordLookup, group: RowGroup, kernels: Sequence[HotColdKernel]
) -> RecordLookup:
    """Wraps the tracker's function for a sharded module, which calls the result after its lookups.

    ``record`` still gets stock tables' ids, as TorchRec passes them. The kernels are TorchRec's of
    the hot/cold tables in ``group``, with the rows that this rank owns. Raises CompatError if
    ``record`` is not a method of TorchRec's delta tracker, or tables share a feature.
    """
    tracker = _delta_tracker_of(record)
    feature_of = _feature_of_table(tracker, group.tables)
    with_rows = tracker._mode == TrackingMode.EMBEDDING

    def record_at_home(features: Any, embeddings: Any, *rest: Any) -> None:
        if not isinstance(embeddings, PartRows):
            record(features, embeddings, *rest)
            return
        for kernel, rows_of_table in _new_rows(embeddings, kernels, "ids"):
            # tables that the tracker skips (fqns_to_skip) have no feature here
            known = {name: rows for name, rows in rows_of_table.items() if name in feature_of}
            ids = _as_features({feature_of[name]: rows for name, rows in known.items()})
            if not with_rows:
                record(ids, None)
            elif ids.values().numel():  # the tracker divides by the number of ids
                kernel.flush()
                weights_by_table = dict(zip(kernel.table_names, kernel.split_embedding_weights()))
                found = [weights_by_table[name][rows].float() for name, rows in known.items()]
                record(ids, torch.cat(found))

    return record_at_home


def state_tracker(
    record: RecordLookup, group: RowGroup, kernels: Sequence[HotColdKernel]
) -> Callable[[PartRows], None]:
    """Makes the function that a hot/cold lookup calls if the tracker records optimizer state.

    TorchRec's tracker reads the state from TBEs, which hold home rows and replicas here. It
    therefore gets one table at a time, and reads the latest state from the home rows. Raises
    CompatError as :func:`lookup_tracker`, or if the optimizer has no state of the tracked kind.
    """
    tracker = _delta_tracker_of(record)
    feature_of = _feature_of_table(tracker, group.tables)
    _refuse_other_states(tracker._mode, group)
    tracker.get_latest = partial(_latest_state, tracker)

    def record_at_home(part: PartRows) -> None:
        for kernel, rows_of_table in _new_rows(part, kernels, "states"):
            kernel.flush()
            for (name, rows), state in zip(rows_of_table.items(), kernel.split_first_state()):
                if name in feature_of:
                    ids = _as_features({feature_of[name]: rows})
                    record(ids, None, _one_table(state, kernel.config.embedding_dims()))

    return record_at_home


def _new_rows(
    part: PartRows, kernels: Sequence[HotColdKernel], what: str
) -> Iterator[tuple[HotColdKernel, Mapping[str, Tensor]]]:
    """Yields each kernel's looked-up rows by table; nothing on a second call for the same batch."""
    # A batch of several micro-batches calls this once per micro-batch with the same ``part.rows``.
    if part.rows.is_first_time(f"{what} of module {part.module}"):
        with torch.no_grad():
            for kernel in kernels:
                yield kernel, kernel.split_rows(part.rows.looked_up(kernel.rows))


def _as_features(rows_of_feature: Mapping[str, Tensor]) -> KeyedJaggedTensor:
    """Makes a batch of one sample whose features hold the given rows, int64 ``(n,)`` each."""
    rows = list(rows_of_feature.values())
    lengths = [rows_n.numel() for rows_n in rows]
    return KeyedJaggedTensor(
        keys=list(rows_of_feature),
        values=torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64, device=rows[0].device if rows else None),
        stride=1,
        length_per_key=lengths,
    )


def _delta_tracker_of(record: RecordLookup) -> Any:
    tracker = getattr(record, "__self__", None)
    if not isinstance(tracker, ModelDeltaTrackerTrec):
        raise CompatError(
            f"hot/cold tables do not support a tracker function of one's own, got {record}: ids "
            "and outputs are not at a table's home as TorchRec's are; use "
            "DistributedModelParallel.init_torchrec_delta_tracker, or place these tables without "
            "HotColdParams"
        )
    return tracker


def _feature_of_table(tracker: Any, tables: Sequence[PackedTable]) -> Mapping[str, str]:
    """Maps each tracked table to the feature that the tracker files it under."""
    features_of = tracker.fqn_to_feature_names()
    # features_of: module path -> features; a feature listed by two modules belongs to two tables
    num_tables = Counter(name for names in features_of.values() for name in set(names))
    found = {}
    for table in tables:
        shared = [name for name in table.feature_names if num_tables[name] > 1]
        if shared:
            raise CompatError(
                f"the delta tracker cannot track hot/cold table {table.name!r}: it files rows "
                f"under features, and another table has its feature {shared[0]!r} too; give each "
                "table features of its own, or skip the module with fqns_to_skip"
            )
        if tracker.table_to_fqn.get(table.name) in features_of:
            found[table.name] = table.feature_names[0]
    return found


def _refuse_other_states(mode: TrackingMode, group: RowGroup) -> None:
    """Refuses a tracking mode whose optimizer state these tables' optimizer does not have."""
    is_elementwise = mode == TrackingMode.MOMENTUM_LAST
    expected = (
        "of the shape of the weights, as Adagrad has"
        if is_elementwise
        else "of one number per row, as row-wise Adagrad has"
    )
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


def _one_table(state: Tensor, dims: Sequence[int]) -> SimpleNamespace:
    """Makes a stand-in for TorchRec's kernel, with the state of one table, for the tracker."""
    tbe = SimpleNamespace(
        momentum1_dev=state.flatten(),
        split_optimizer_states=lambda: [[state]],
    )
    return SimpleNamespace(_emb_module=tbe, _config=SimpleNamespace(embedding_dims=lambda: dims))
