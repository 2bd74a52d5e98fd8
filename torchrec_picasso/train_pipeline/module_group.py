"""Hot/cold modules whose rows travel together: one header, one exchange of ids and rows for all.

A step then has as many collectives for ten modules as for one. Modules stay apart where they cannot
be joined: with another wire precision, with per-sample weights beside none, with samples of their
own beside the batch's, or in waves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable, LazyNoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.rows.batch_ids import BatchIds
from torchrec_picasso.rows.batch_rows import PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.rows.sound_features import sound_features
from torchrec_picasso.sharding.features import with_weights
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.train_pipeline.odd_features import OddFeatures, spread
from torchrec_picasso.train_pipeline.processed_module import ProcessedModule

__all__ = ["ModuleGroup", "ScheduledModule", "group_modules"]

ScheduledModule = HotColdModule | ProcessedModule
"""What a schedule can drive the exchange of."""


class ModuleGroup:
    """Sharded modules whose exchange a schedule drives as one.

    Args:
        modules: They, by name, in the order of the group's modules.
        is_odd: Whether their features have samples of their own; the batch is one part then.
    """

    def __init__(self, modules: Mapping[str, ScheduledModule], *, is_odd: bool = False) -> None:
        self.modules = dict(modules)
        self.rows = RowGroup.of_several([module.group for module in modules.values()])
        self._is_odd = is_odd

    @property
    def num_waves(self) -> int:
        """Waves that its packs travel in where a schedule staggers them."""
        return len(self.rows.plan.waves)

    def request(self, batch: Any, sizes_K: Sequence[int], has_data: bool) -> RowRequest:
        """Starts asking for the rows of a batch. Collective.

        Args:
            batch: The whole batch, as the model gets it.
            sizes_K: Samples of each part.
            has_data: Whether the batch comes from this rank's data.

        Raises:
            InputError: If features have a batch size each and do not say whose rows samples have.
        """
        modules = self.modules.values()
        sound = [sound_features(self._input_of(module, batch)) for module in modules]
        features_of = [self._features_of(module, of) for module, of in zip(modules, sound)]
        sizes = None if self._is_odd else sizes_K
        with torch.no_grad():
            ids = BatchIds.read(features_of, self.rows, sizes, has_data, sound)
            return RowRequest(self.rows, ids)

    def _input_of(self, module: ScheduledModule, batch: Any) -> KeyedJaggedTensor:
        args, kwargs = module.forward.args.build_args_kwargs(batch)
        args, kwargs = module.preprocess_input(args, kwargs)
        return maybe_td_to_kjt(next(iter((*args, *kwargs.values()))), None)

    def _features_of(
        self, module: ScheduledModule, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        if not self._is_odd:
            return module.features_of(features)
        if not module.group.plan.takes_weights:  # nothing is pooled
            features = with_weights(features, None)
        return OddFeatures.of(module.features_of(features), features)

    def joined_output(self, name: str, parts: Sequence[tuple[PartRows, int]]) -> LazyAwaitable[Any]:
        """The output of a module for some parts of a batch, one after the other.

        Args:
            name: Name of the module.
            parts: Rows and number of samples of each part.
        """
        outputs = [self.output(name, rows) for rows, _ in parts]
        if len(outputs) == 1:
            return outputs[0]
        sizes = [size for _, size in parts]
        return LazyNoWait(join_outputs([output.wait() for output in outputs], sizes))

    def output(self, name: str, rows: PartRows) -> LazyAwaitable[Any]:
        """The output of a module for one part of a batch.

        Args:
            name: Of the module.
            rows: Of the part.
        """
        module = self.modules[name]
        return spread(module, rows) if self._is_odd else module.output(rows)


def group_modules(
    modules: Mapping[str, ScheduledModule], weighted: Collection[str], odd: Collection[str] = ()
) -> list[ModuleGroup]:
    """Joins what can travel together.

    Args:
        modules: By name, in the order in which the model calls them.
        weighted: Those whose bags have per-sample weights.
        odd: Those whose features have other samples than the batch.
    """
    alike: dict[Any, dict[str, ScheduledModule]] = {}
    for name, module in modules.items():
        ranks = module.group.ranks
        has_weights = name in weighted or isinstance(module, ProcessedModule)
        is_weighted = has_weights and module.group.plan.takes_weights
        alone = name if module.group.plan.num_row_waves > 1 else None
        key = (name in odd, ranks.pg, *ranks.wire, is_weighted, alone)
        alike.setdefault(key, {})[name] = module
    return [ModuleGroup(of_group, is_odd=is_odd) for (is_odd, *_), of_group in alike.items()]
