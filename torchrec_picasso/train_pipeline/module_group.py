"""Hot/cold modules whose rows travel together: one header, one exchange of ids and rows for all.

A step then has as many collectives for ten modules as for one. Modules stay apart where they cannot
be joined: with another wire precision, with per-sample weights beside none, or in waves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from torchrec_picasso.rows.batch_ids import BatchIds
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.sharding.sharded_module import HotColdModule

__all__ = ["ModuleGroup", "group_modules"]


class ModuleGroup:
    """Sharded modules whose exchange a schedule drives as one.

    Args:
        modules: They, by name, in the order of the group's modules.
    """

    def __init__(self, modules: Mapping[str, HotColdModule]) -> None:
        self.modules = dict(modules)
        self.rows = RowGroup.of_several([module.group for module in modules.values()])

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
        """
        features_of = []
        for module in self.modules.values():
            args, kwargs = module.forward.args.build_args_kwargs(batch)
            (features, *_), _ = module.preprocess_input(args, kwargs)
            features_of.append(module.features_of(features))
        with torch.no_grad():
            return RowRequest(self.rows, BatchIds.read(features_of, self.rows, sizes_K, has_data))


def group_modules(
    modules: Mapping[str, HotColdModule], weighted: Collection[str]
) -> list[ModuleGroup]:
    """Joins what can travel together.

    Args:
        modules: By name, in the order in which the model calls them.
        weighted: Those whose bags have per-sample weights.
    """
    alike: dict[Any, dict[str, HotColdModule]] = {}
    for name, module in modules.items():
        ranks = module.group.ranks
        is_weighted = name in weighted and module.group.plan.takes_weights
        alone = name if module.num_waves > 1 else None
        key = (ranks.pg, *ranks.wire, is_weighted, alone)
        alike.setdefault(key, {})[name] = module
    return [ModuleGroup(of_group) for of_group in alike.values()]
