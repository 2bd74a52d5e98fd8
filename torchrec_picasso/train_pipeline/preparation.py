"""Reads the ids of batches in a data loader, as far as the plan alone decides.

Checks, linear ids and the sort of a batch need no other rank, no row and no hot set, so the
workers of a ``DataLoader`` may do them, in processes of their own. The step then has the same
tensors that it would have computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_picasso._torchrec import (
    ArgInfo,
    GetAttrArgInfoStep,
    GetItemArgInfoStep,
    NoopArgInfoStep,
)
from torchrec_picasso.batches.feed import PreparedBatch
from torchrec_picasso.batches.split import micro_batch_sizes
from torchrec_picasso.ops.id_reader import IdReader, PreparedIds
from torchrec_picasso.ops.ids import IdSpace, PackedTable
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.rows.group import ROUTES, merged_tables
from torchrec_picasso.rows.valid_features import form_error, with_weights
from torchrec_picasso.train_pipeline.model_parts import ScheduledModule
from torchrec_picasso.train_pipeline.module_group import exchange_key, is_weighted

_STEPS = (GetAttrArgInfoStep, GetItemArgInfoStep, NoopArgInfoStep)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Reading:
    """How the features of one module are read."""

    name: str
    source: ArgInfo
    """Path from a batch to the features."""
    tables: Sequence[PackedTable]
    """The tables of the module, without their hot rows."""
    exchange: int
    """Modules with one number may share an exchange."""
    weights: tuple[bool, bool]
    """Whether weights travel, for features without and with per-sample weights."""


@dataclass(frozen=True)
class Preparation:
    """Reads the ids of a batch ahead of its step: ``prepare(batch)``, in any process.

    Made by :meth:`.InterleavedTrainPipeline.preparation`, for the ``collate_fn`` of a
    ``DataLoader`` with workers; without these it saves nothing. It can be pickled, and holds names
    and sizes of the tables: no weights, no hot rows, no process group.

    Only the ids of hot/cold tables that travel as rows are prepared. The step itself reads the ids
    of other tables, of features that a module makes ahead of the model (``pipeline_postproc``),
    that have their own batch sizes (VBE) or are on an accelerator, malformed ones, and those whose
    prepared ids do not fit, such as sequences for another number of micro-batches.
    """

    readings: Sequence[_Reading] = ()
    num_micro_batches: int = 1
    """Number that sequences are prepared for."""

    @staticmethod
    def build(modules: Mapping[str, ScheduledModule]) -> Preparation:
        """Collects how the features of a traced model's modules are read, in their order."""
        numbers: dict[Any, int] = {}
        readings = []
        for name, module in modules.items():
            args = module.forward.args
            source = next(iter((*args.args, *args.kwargs.values())))
            if not all(isinstance(step, _STEPS) for step in source.steps):
                continue
            none = torch.empty(0, dtype=torch.int64)
            tables = [replace(table, hot_rows_H=none) for table in module.group.tables]
            exchange = numbers.setdefault(exchange_key(name, module), len(numbers))
            weights = is_weighted(module, False), is_weighted(module, True)
            readings.append(_Reading(name, source, tables, exchange, weights))
        return Preparation(readings)

    def __reduce__(self) -> tuple[Any, ...]:
        return Preparation, (self.readings, self.num_micro_batches)

    @cached_property
    def plan(self) -> str:
        """A name of the tables and of where their features are in a batch."""
        parts = []
        for each in self.readings:
            steps = [(type(step).__name__, vars(step)) for step in each.source.steps]
            parts.append((each.name, steps, each.tables))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def __call__(self, batch: Any) -> Any:
        """Reads the ids of a batch.

        Returns:
            A :class:`.PreparedBatch`, which only this pipeline takes in place of the batch; the
            batch itself if nothing can be prepared.
        """
        groups: dict[tuple[int, bool, int], dict[str, tuple[_Reading, KeyedJaggedTensor]]] = {}
        for each in self.readings if not isinstance(batch, PreparedBatch) else ():
            features = maybe_td_to_kjt(each.source.process_steps(batch), None)
            has_weights = each.weights[features.weights_or_none() is not None]
            # features with other numbers of samples do not travel together
            key = each.exchange, has_weights, features.stride()
            groups.setdefault(key, {})[each.name] = each, features
        ids_of = {}
        for (_, has_weights, _), group in groups.items():
            ids = self._read(list(group.values()), has_weights)
            if ids is not None:
                ids_of[tuple(group)] = ids
        return PreparedBatch(batch, self.plan, ids_of) if ids_of else batch

    def _read(
        self, group: Sequence[tuple[_Reading, KeyedJaggedTensor]], has_weights: bool
    ) -> PreparedIds | None:
        """Reads the ids of modules that share an exchange; ``None`` = the step has to."""
        readings, features_of = zip(*group)
        names = tuple(each.name for each in readings)
        if names not in self._readers:
            merged = merged_tables([each.tables for each in readings])
            tables = [table for table in merged if ROUTES[table.route].reads_unique_rows]
            reader = None
            if tables:
                reader = IdReader(IdSpace.build(tables, _CPU), PackPlan.build(tables, _CPU))
            self._readers[names] = reader, tables
        reader, tables = self._readers[names]
        # the step has to read features on a device, with their own batch sizes, or that are bad
        if reader is None or any(
            f.device() != _CPU or f.variable_stride_per_key() or form_error(f) for f in features_of
        ):
            return None
        by_module = []
        for number, features in enumerate(features_of):
            wanted = [f for t in tables if t.module == number for f in t.feature_names]
            if wanted:
                order = list(map(features.keys().index, wanted))
                by_module.append(with_weights(features, None).permute(order))
        one = by_module[0] if len(by_module) == 1 else KeyedJaggedTensor.concat(by_module)
        sizes_K = micro_batch_sizes(one.stride(), self.num_micro_batches)
        return PreparedIds.from_read(reader.read(one, sizes_K, has_weights), one)

    @cached_property
    def _readers(self) -> dict[tuple[str, ...], tuple[IdReader | None, list[PackedTable]]]:
        """Readers of modules that share an exchange, with their tables, by the modules' names."""
        return {}
