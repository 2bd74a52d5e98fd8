"""The small model under a named plan, with its optimizers, on however many ranks there are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.reliability.small_model import BAGS, SEQUENCES, SmallModel, rank_batch
from torchrec_picasso import HotColdParams
from torchrec_picasso.app.runs.placements import AnyTypeSharder, hot_cold_sharders
from torchrec_picasso.placement import Form

OURS = ("rows", "node_rows", "all_hot", "bags", "uneven")
"""Hot/cold: a quarter of the rows hot; the same by host; small tables all hot and no other row;
bags of pooled tables; homes of unequal blocks, empty ones among them."""
STOCK = ("table_wise", "row_wise", "column_wise")
PLANS = OURS + STOCK
RANKS_OF = dict.fromkeys(PLANS, (1, 2, 3, 4)) | {"node_rows": (4, 6)}
"""Numbers of ranks that a plan is tried on; by host they pretend to be on hosts of two."""

OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, float]]] = {
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
}
"""Optimizers that FBGEMM has a CPU kernel for: one value of state a row, one an element, none."""

_SMALL_ROWS = 12
_FEWEST_COLUMNS = 4  # FBGEMM's narrowest shard
_CPU = torch.device("cpu")


class SmallTrainer:
    """One sharded model. Collective: every rank of the default process group makes one.

    Args:
        plan: One of :data:`PLANS`.
        optimizer: One of :data:`OPTIMIZERS`, of the tables; the rest has Adagrad.
        seed: Seed of the weights that training starts from.
    """

    def __init__(self, plan: str, optimizer: str, seed: int = 0) -> None:
        pg = dist.group.WORLD
        assert pg is not None, "init_process_group comes first"
        self._rank, self._world_size = pg.rank(), pg.size()
        if plan == "node_rows":
            os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(self._rank % 2)}
        model = SmallModel(seed)
        start = {name: value.detach().clone() for name, value in model.state_dict().items()}
        kind, settings = OPTIMIZERS[optimizer]
        sharders: list[Any] = (
            hot_cold_sharders()
            if plan in OURS
            else [AnyTypeSharder(), EmbeddingCollectionSharder()]
        )
        plans = {}
        for path, sharder in zip(("ebc", "ec"), sharders, strict=True):
            module = model.get_submodule(path)
            apply_optimizer_in_backward(kind, module.parameters(), dict(settings))
            plans[path] = _plan(plan, module, sharder, self._world_size)
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(pg),
            device=_CPU,
            plan=ShardingPlan(plan=plans),
            sharders=sharders,
        )
        _write(self.model, start)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])

    def train(self, steps: Iterable[int]) -> list[float]:
        """Trains and gives the global batches' losses. Collective."""
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss, _ = self.model(rank_batch(step, self._rank, self._world_size))
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        total = torch.stack(losses).double()
        dist.all_reduce(total)
        return [float(loss) for loss in total / self._world_size]

    def state(self) -> dict[str, Any]:
        """State that a checkpoint holds."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what a checkpoint held. Collective."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])


def num_column_shards(dim: int, world_size: int) -> int:
    """Shards of a table that ``column_wise`` cuts over the ranks, as narrow as FBGEMM can hold."""
    shards = min(world_size, dim // _FEWEST_COLUMNS)
    while dim % (shards * _FEWEST_COLUMNS):
        shards += 1
    return shards


def _plan(name: str, module: nn.Module, sharder: Any, world_size: int) -> Any:
    tables = BAGS if set(BAGS) <= set(dict(_tables_of(module))) else SEQUENCES
    generators = {}
    for index, (table, (_, dim)) in enumerate(tables.items()):
        if name == "table_wise" or (name == "bags" and tables is BAGS):
            generators[table] = table_wise(rank=index % world_size)
        elif name == "column_wise":
            shards = num_column_shards(dim, world_size)
            ranks = [(index + shard) % world_size for shard in range(shards)]
            generators[table] = column_wise(ranks=ranks)
        else:
            generators[table] = row_wise()
    plan = construct_module_sharding_plan(
        module,
        generators,
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    if name in OURS:
        for table, (rows, _) in tables.items():
            _mark(name, plan[table], rows, is_bag=tables is BAGS)
    return plan


def _tables_of(module: nn.Module) -> Iterable[tuple[str, int]]:
    for path, parameter in module.named_parameters():
        yield path.split(".")[-2], len(parameter)


def _mark(name: str, sharding: ParameterSharding, rows: int, is_bag: bool) -> None:
    """Makes a table of a plan hot/cold."""
    if name == "bags" and is_bag:
        sharding.cache_params = HotColdParams(form="bags")
        return
    # every third row, so that hot rows are spread over the homes
    by_thirds = sorted(range(rows), key=lambda row: (row % 3, row))
    num_hot = (rows if rows <= _SMALL_ROWS else 0) if name == "all_hot" else rows // 4
    form: Form = "node_rows" if name == "node_rows" else "rows"
    sharding.cache_params = HotColdParams(hot_rows=by_thirds[:num_hot], form=form)
    if name == "uneven":
        _cut_unevenly(sharding, rows)


def _cut_unevenly(sharding: ParameterSharding, rows: int) -> None:
    """Gives rank 0 a seventh of the rows, rank 1 the rest, others nothing.

    A checkpoint tells shards apart by where they start, so torch can save none where an empty one
    stands before a full one; the planner makes none such either.
    """
    spec: Any = sharding.sharding_spec
    num_shards, start = len(spec.shards), 0
    sizes = [rows] if num_shards == 1 else [rows // 7, rows - rows // 7, *[0] * (num_shards - 2)]
    for shard, size in zip(spec.shards, sizes, strict=True):
        shard.shard_sizes, shard.shard_offsets = [size, shard.shard_sizes[1]], [start, 0]
        start += size


def _write(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Writes unsharded weights into a sharded model, in place."""
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
            value.detach().copy_(state[name])
            continue
        for shard in value.local_shards():
            cut = tuple(
                slice(start, start + size)
                for start, size in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
            )
            shard.tensor.detach().copy_(state[name][cut])
