"""Hot/cold modules whose rows travel together: one header, one exchange of ids and rows for all.

A step thus has as many collectives for ten modules as for one. Modules stay in groups of their own
if they cannot be joined: modules with different wire precision, with and without per-sample
weights, with and without variable-batch (VBE) features, and modules with several waves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.batches.feed import PreparedBatch
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.errors import CompatError
from torchrec_picasso.rows.batch_rows import MicroBatchRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.rows.valid_features import valid_features
from torchrec_picasso.sharding.output_dist import awaitable_of
from torchrec_picasso.train_pipeline.model_parts import ProcessedModule, ScheduledModule
from torchrec_picasso.train_pipeline.variable_batch import (
    VariableBatchFeatures,
    check_inverse_indices,
    spread,
)


class ModuleGroup:
    """Sharded modules whose exchange a schedule drives as one, in the order of their rows.
    ``is_vbe`` modules have variable-batch (VBE) features; their batch is never cut."""

    def __init__(self, modules: Mapping[str, ScheduledModule], *, is_vbe: bool = False) -> None:
        self.modules = dict(modules)
        self.row_group = RowGroup.merged([module.group for module in modules.values()])
        self._is_vbe = is_vbe

    def number_of(self, name: str) -> int:
        """Position of a module in the group, by which its rows are found."""
        return list(self.modules).index(name)

    def check(self, features_of: Mapping[str, KeyedJaggedTensor]) -> None:
        """Refuses what no header reports to other ranks: they must agree on it before the request.

        Raises CompatError on this rank alone.
        """
        weighted: dict[bool, list[str]] = {True: [], False: []}
        for name, module in self.modules.items():
            features = features_of[name]
            self.row_group.check(features)
            weighted[is_weighted(module, features.weights_or_none() is not None)].append(name)
            if self._is_vbe:
                check_inverse_indices(features)
        if all(weighted.values()):
            raise CompatError(
                f"the features of {', '.join(weighted[True])} have per-sample weights and those of "
                f"{', '.join(weighted[False])} have none, unlike in the first batch, by which they "
                "share an exchange; give the features of all batches weights, or of none"
            )

    def request(
        self,
        features_of: Mapping[str, KeyedJaggedTensor],
        sizes_K: Sequence[int],
        has_data: bool,
        prepared: PreparedBatch | None = None,
    ) -> RowRequest:
        """Starts to request the rows that a batch's features look up, by module. Collective."""
        validated = [valid_features(features_of[name]) for name in self.modules]
        # the features that a module looks up, in the order of its tables
        pairs = zip(self.modules.values(), validated)
        by_module = [module.features_of(features) for module, features in pairs]
        sizes: Sequence[int] | None = sizes_K
        if self._is_vbe:  # VBE rows belong to no micro-batch
            by_module, sizes = list(map(VariableBatchFeatures.pad, by_module, validated)), None
        ids = None if prepared is None else prepared.ids_of.get(tuple(self.modules))
        with torch.no_grad():
            return RowRequest(self.row_group, by_module, sizes, has_data, validated, ids)

    def output(
        self, name: str, acquired: Sequence[tuple[MicroBatchRows, int]]
    ) -> LazyAwaitable[Any]:
        """Computes a module's output from the rows and numbers of samples of micro-batches."""
        self.row_group.check_unwritten()
        module = self.modules[name]
        compute = partial(spread, module) if self._is_vbe else module.output
        outputs = [compute(rows) for rows, _ in acquired]
        if len(outputs) == 1:
            return outputs[0]
        sizes = [size for _, size in acquired]
        return awaitable_of(join_outputs([output.wait() for output in outputs], sizes))


def is_weighted(module: ScheduledModule, has_weights: bool) -> bool:
    """Whether weights travel with the module's ids; sequences have no use for them."""
    return module.group.plan.has_pooling and (has_weights or isinstance(module, ProcessedModule))


def exchange_key(name: str, module: ScheduledModule) -> tuple[Any, ...]:
    """Returns what is equal for modules that can share an exchange, whatever their features."""
    # One exchange needs one process group, way between hosts and wire precision; a module with
    # several waves has its own name in the key, so it travels alone.
    group, ranks = module.group, module.group.ranks
    return (ranks.pg, type(group.exchanges), *ranks.wire, name if group.is_staggered else None)


def group_modules(
    modules: Mapping[str, ScheduledModule], weighted: Collection[str], vbe: Collection[str] = ()
) -> list[ModuleGroup]:
    """Groups the modules that can travel together, in the order in which the model calls them. The
    input of ``weighted`` modules has per-sample weights; ``vbe`` ones have VBE features."""
    alike: dict[Any, dict[str, ScheduledModule]] = {}
    # All ranks build the same keys.
    for name, module in modules.items():
        key = (name in vbe, *exchange_key(name, module), is_weighted(module, name in weighted))
        alike.setdefault(key, {})[name] = module
    return [ModuleGroup(group, is_vbe=is_vbe) for (is_vbe, *_), group in alike.items()]
