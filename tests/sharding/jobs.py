"""Small training jobs that run the same under any placement, and what they leave behind.

A job is data; ``train`` runs it on one rank and returns losses, weights and optimizer state as
local shards, which ``whole`` joins in the test's own process. Every placement starts from the same
weights and sees the same batches, so two results can be compared number by number.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import data_parallel, row_wise, table_wise
from torchrec.optim import optimizers

import torchrec_picasso as picasso
from tests.support.hosts import pretend_hosts
from tests.support.placing import distribute, place, wire_codecs
from tests.support.tables import Table, bags_of
from torchrec_picasso.placement import FORMS, Form
from torchrec_picasso.sharding.in_backward import HotColdPooledLookup, HotColdSequenceLookup
from torchrec_picasso.storage import row_storage
from torchrec_picasso.storage.row_storage import RowStorage
from torchrec_picasso.storage.row_tables import MemoryLayout, choose_memory

RTOL, ATOL = 1e-4, 2e-5
"""Sums of float32 in another order, amplified by a few steps of training."""

OPTIMIZERS: Mapping[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adam": torchrec.optim.Adam,
    "partial_rowwise_adam": optimizers.PartialRowWiseAdam,
    "lamb": optimizers.LAMB,
    "partial_rowwise_lamb": optimizers.PartialRowWiseLAMB,
    "lars": optimizers.LarsSGD,
}


PLAIN = (
    Table("a", 8, 60, ("f0",)),
    Table("b", 8, 12, ("f1", "f2")),
    Table("c", 8, 6, ("f3",), mean=True),
)
"""One dim, no table smaller than 3 ranks: stock row-wise trains it right on CPU as well."""

ODD = (
    Table("a", 8, 50, ("f0",)),
    Table("b", 16, 3, ("f1", "f2"), mean=True),
    Table("one_row", 8, 1, ("f3",)),
    Table("two_rows", 16, 2, ("f0", "f4")),
    Table("d", 4, 40, ("f5",), mean=True),
)
"""Mixed dims, tables smaller than the world, a feature in two tables, features sharing a table."""


@dataclass(frozen=True)
class Job:
    """One training run.

    ``placement`` maps a table to ``table_wise``, ``row_wise``, ``data_parallel``, a number of hot
    rows, or the name of a form, such as ``bags``: hot/cold, without hot rows; ``"*"`` stands for
    all others.
    """

    placement: Mapping[str, str | int]
    tables: tuple[Table, ...] = PLAIN
    optimizer: str = "rowwise_adagrad"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    lopsided: bool = False
    """Whether hot/cold tables are cut into homes of unequal size, an empty one among them."""
    waves: Mapping[str, int] = field(default_factory=dict)
    """Waves of hot/cold tables; 0 for those not named."""
    two_tables: bool = False
    """Whether replicas are a table of their own, as on a GPU beside homes in managed memory."""
    kernel_of_table: Mapping[str, str] = field(default_factory=dict)
    """Compute kernels other than ``fused``; on the CPU their memory is the same."""
    kwargs_of_table: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_steps: int = 10
    lr_decay: float = 1.0
    batch_sizes: tuple[int, ...] = (16,)
    """Samples of each rank, cyclic; 0 is allowed."""
    weighted: bool = False
    single: tuple[str, ...] = ()
    """Features of one id per sample."""
    wire: str | None = None
    seed: int = 0
    by_host: tuple[str, ...] = ()
    """Tables whose rows travel by host, of those whose rows travel; ``"*"`` stands for all."""
    num_places: int = 2
    """Ranks of each host that the ranks pretend to be on, where rows travel by host."""

    def batch_size(self, rank: int) -> int:
        return self.batch_sizes[rank % len(self.batch_sizes)]

    @property
    def features(self) -> list[str]:
        return sorted({f for table in self.tables for f in table.features})


def keys_of(tables: Sequence[Any]) -> list[str]:
    """Keys of a collection's output, in a fixed order; a feature of two tables has one of each."""
    pairs = [
        (name, table.name)
        for table in tables
        for name in getattr(table, "feature_names", None) or table.features
    ]
    owners = [name for name, _ in pairs]
    return [f"{f}@{table}" if owners.count(f) > 1 else f for f, table in pairs]


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, list[tuple[tuple[int, ...], Tensor]]]
    states: dict[str, list[tuple[tuple[int, ...], Tensor]]]
    dense: dict[str, Tensor]
    replicas: list[Tensor]
    """Every per-row tensor's replicas, pack by pack."""


class Model(nn.Module):
    """An EBC under one linear layer; returns (loss, prediction) as pipelines expect."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.ebc = bags_of(job.tables, is_weighted=job.weighted)
        self.keys = keys_of(job.tables)
        self.over = nn.Linear(sum(t.dim * len(t.features) for t in job.tables), 1)

    def look_up(self, batch: Batch) -> Any:
        return self.ebc(batch.sparse_features)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.look_up(batch)
        out = self.over(torch.cat([pooled[key] for key in self.keys], dim=1)).squeeze(1)
        # not a mean: that would be nan for a rank without samples
        loss = ((out - batch.labels) ** 2).sum() / 6
        return loss, out.detach()


def make_batch(job: Job, rank: int, step: int) -> Batch:
    """A jagged batch, skewed to low ids, with empty bags; the same for every placement."""
    generator = torch.Generator().manual_seed(100_000 * job.seed + 1000 * step + rank)
    batch_size = job.batch_size(rank)
    rows_of = {f: min(t.rows for t in job.tables if f in t.features) for f in job.features}
    lengths = [
        torch.ones(batch_size, dtype=torch.int64)
        if f in job.single
        else torch.randint(0, 5, (batch_size,), generator=generator)
        for f in job.features
    ]
    values = [
        (torch.rand(int(length.sum()), generator=generator) ** 3 * rows_of[f]).long()
        for f, length in zip(job.features, lengths)
    ]
    num_lookups = sum(v.numel() for v in values)
    return Batch(
        dense_features=torch.zeros(batch_size, 1),
        sparse_features=torchrec.KeyedJaggedTensor(
            keys=list(job.features),
            values=torch.cat(values),
            lengths=torch.cat(lengths),
            weights=torch.rand(num_lookups, generator=generator) if job.weighted else None,
        ),
        labels=torch.randn(batch_size, generator=generator),
    )


class RowWiseOnCpuSharder(EmbeddingBagCollectionSharder):
    """TorchRec's own sharder, which leaves row-wise out on CPU, with it put back."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(dict.fromkeys([*super().sharding_types(compute_device_type), "row_wise"]))


def build(job: Job, rank: int, world_size: int) -> DistributedModelParallel:
    """Shards the job's model, with the weights that the unsharded model starts from."""
    return shard(Model(job), job, {"ebc": job.tables}, world_size)


def shard(
    model: nn.Module,
    job: Job,
    tables_of: Mapping[str, Sequence[Table]],
    world_size: int,
    pg: dist.ProcessGroup | None = None,
) -> DistributedModelParallel:
    """Shards a model as its job says, with the weights that it has; tables are by collection."""
    if job.by_host:
        pretend_hosts(dist.get_rank(), job.num_places)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    places = {
        table.name: job.placement.get(table.name, job.placement.get("*"))
        for tables in tables_of.values()
        for table in tables
    }
    hot_cold = {
        table.name: params
        for tables in tables_of.values()
        for table in tables
        if (
            params := params_of(
                places[table.name],
                table.rows,
                job.waves.get(table.name, 0),
                not {"*", table.name}.isdisjoint(job.by_host),
            )
        )
        is not None
    }
    bags, sequences = (
        (picasso.HotColdEmbeddingBagCollectionSharder, picasso.HotColdEmbeddingCollectionSharder)
        if hot_cold
        else (RowWiseOnCpuSharder, EmbeddingCollectionSharder)
    )
    sharders, plans = dict[type, Any](), {}
    for path, tables in tables_of.items():
        module = model.get_submodule(path)
        kind = sequences if isinstance(module, torchrec.EmbeddingCollection) else bags
        if kind not in sharders:
            sharders[kind] = kind(qcomm_codecs_registry=wire_codecs(job.wire))
        for name, weight in module.named_parameters():
            kwargs = {**job.optimizer_kwargs, **job.kwargs_of_table.get(name.split(".")[-2], {})}
            apply_optimizer_in_backward(OPTIMIZERS[job.optimizer], [weight], kwargs)
        ways = {one.name: way_of(places[one.name], i % world_size) for i, one in enumerate(tables)}
        own = {name: hot_cold[name] for name in ways if name in hot_cold}
        plans[path] = plan = place(module, sharders[kind], ways, own, pg)
        for table in tables:
            if table.name in job.kernel_of_table:
                plan[table.name].compute_kernel = job.kernel_of_table[table.name]
            if job.lopsided and isinstance(places[table.name], int):
                _cut_lopsided(plan[table.name], table.rows)
    with _layout_in_tables(2 if job.two_tables else 1):
        sharded = distribute(model, plans, sharders.values(), pg=pg)
    load_whole(sharded, start)
    return sharded


@contextmanager
def _layout_in_tables(num_tables: int) -> Iterator[None]:
    """Storages made meanwhile have two tables wherever they have hot rows, or one as chosen.

    Two are chosen on a GPU only, for replicas in its memory beside homes in managed memory.
    """

    def choose(
        config: GroupedEmbeddingConfig, device: torch.device, num_hot_rows: int
    ) -> MemoryLayout:
        layout = choose_memory(config, device, num_hot_rows)
        assert not layout.in_two_tables
        return replace(layout, in_two_tables=num_tables == 2 and num_hot_rows > 0)

    with mock.patch.object(row_storage, "choose_memory", choose):
        yield


def way_of(where: str | int | None, owner: int) -> Any:
    """How TorchRec places a table; ``owner`` is the rank of one that is placed table-wise."""
    if where == "data_parallel":
        return data_parallel()
    form = FORMS.get("rows" if isinstance(where, int) else str(where))
    sharding_type = where if form is None else form.sharding_type
    return row_wise() if sharding_type == "row_wise" else table_wise(rank=owner)


def params_of(
    where: str | int | None, rows: int, wave: int, by_host: bool = False
) -> picasso.HotColdParams | None:
    """Of a hot/cold table: hot is every third row, so that homes share hot rows."""
    if isinstance(where, str) and where in FORMS:
        return picasso.HotColdParams(form=cast(Form, where))
    if not isinstance(where, int):
        return None
    by_thirds = sorted(range(rows), key=lambda row: (row % 3, row))
    form: Form = "node_rows" if by_host else "rows"
    return picasso.HotColdParams(hot_rows=by_thirds[:where], wave=wave, form=form)


def _cut_lopsided(sharding: Any, rows: int) -> None:
    """Gives rank 0 a seventh of the rows, the last rank the rest, others nothing."""
    shards = sharding.sharding_spec.shards
    sizes = [rows // 7, *[0] * (len(shards) - 2), rows - rows // 7] if len(shards) > 1 else [rows]
    start = 0
    for shard, size in zip(shards, sizes, strict=True):
        shard.shard_sizes, shard.shard_offsets = [size, shard.shard_sizes[1]], [start, 0]
        start += size


def load_whole(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Writes unsharded weights into a sharded model's state dict, in place."""
    for name, value in model.state_dict().items():
        if not isinstance(value, ShardedTensor | DTensor):
            value.detach().copy_(state[name])
            continue
        for offsets, shard in shards_of(value):
            cut = tuple(slice(start, start + size) for start, size in zip(offsets, shard.shape))
            shard.detach().copy_(state[name][cut])


def shards_of(value: ShardedTensor | DTensor) -> list[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in shards]
    local: Any = value.to_local()
    # a rank without shards has an offset all the same
    return [
        (tuple(offsets), shard)
        for shard, offsets in zip(local.local_shards(), local.local_offsets())
    ]


def dense_optimizer(model: DistributedModelParallel) -> torch.optim.Optimizer:
    parameters = [p for name, p in model.named_parameters() if "over" in name]
    return torch.optim.SGD(parameters, lr=0.05)


def train(
    model: DistributedModelParallel,
    job: Job,
    rank: int,
    steps: Iterable[int],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    optimizer = optimizer or dense_optimizer(model)
    losses = []
    for step in steps:
        for group in model.fused_optimizer.param_groups:
            group["lr"] = group["lr"] * (job.lr_decay if step else 1.0)
        model.fused_optimizer.zero_grad()  # hands the learning rate to the kernels
        optimizer.zero_grad()
        loss, _ = model(make_batch(job, rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def local_shards(value: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, ShardedTensor | DTensor):
        return [(offsets, shard.detach().clone()) for offsets, shard in shards_of(value)]
    return [((0,) * value.dim(), value.detach().clone())]


def result_of(model: DistributedModelParallel, losses: list[float]) -> Result:
    """Reads out everything that two placements must agree on."""
    return result_of_module(model, losses, ("ebc",))


def result_of_module(model: nn.Module, losses: list[float], sharded: Sequence[str]) -> Result:
    """The same of a model whose sharded modules have these names."""

    def is_table(name: str) -> bool:
        return any(part in sharded for part in name.split("."))

    state = model.state_dict()
    optimizer_state = model.fused_optimizer.state_dict()["state"]
    return Result(
        losses=losses,
        weights={name: local_shards(v) for name, v in state.items() if is_table(name)},
        states={
            f"{name}/{key}": local_shards(v)
            for name, states in optimizer_state.items()
            for key, v in states.items()
            if isinstance(v, (Tensor, ShardedTensor))
        },
        dense={name: v.detach().clone() for name, v in state.items() if not is_table(name)},
        replicas=replicas_of(model),
    )


def checkpoint_of(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}


def replicas_of(model: nn.Module) -> list[Tensor]:
    """Replicas of every per-row tensor, read from the storages themselves."""
    return [
        rows.replicas.clone()
        for storage in storages_of(model)
        if storage.hot_homes.num_hot_rows
        for rows in storage.tables.per_row()
    ]


def storages_of(model: nn.Module) -> list[RowStorage]:
    """Homes and replicas of all packs."""
    return [
        storage
        for module in model.modules()
        for lookup in getattr(module, "_lookups", [])
        if isinstance(lookup, (HotColdPooledLookup, HotColdSequenceLookup))
        for storage in lookup._group.storages
    ]


def run_jobs(rank: int, world_size: int, jobs: Mapping[str, Job]) -> dict[str, Result]:
    """Trains every job on this rank; for the launcher."""
    results = {}
    for name, job in jobs.items():
        model = build(job, rank, world_size)
        results[name] = result_of(model, train(model, job, rank, range(job.num_steps)))
    return results


def whole(results: Sequence[Result], kind: str) -> dict[str, Tensor]:
    """Joins all ranks' shards of ``weights`` or ``states`` to whole tensors by name."""
    shards: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for result in results:
        for name, parts in getattr(result, kind).items():
            shards.setdefault(name, []).extend(parts)
    joined = {}
    for name, parts in shards.items():
        size = [
            max(offset[d] + part.size(d) for offset, part in parts)
            for d in range(parts[0][1].dim())
        ]
        joined[name] = torch.full(size, torch.nan)
        for offset, part in parts:
            cut = tuple(slice(o, o + s) for o, s in zip(offset, part.shape))
            joined[name][cut] = part
    return joined


def assert_same_results(
    mine: Sequence[Result], its: Sequence[Result], rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Compares what all ranks left behind; replicas of ours are the same bits on all ranks."""
    for kind in ("weights", "states"):
        torch.testing.assert_close(whole(mine, kind), whole(its, kind), rtol=rtol, atol=atol)
    for my, other in zip(mine, its, strict=True):
        torch.testing.assert_close(my.dense, other.dense, rtol=rtol, atol=atol)
        torch.testing.assert_close(my.losses, other.losses, rtol=rtol, atol=atol)
        torch.testing.assert_close(my.replicas, mine[0].replicas, rtol=0, atol=0)
