"""TorchRec's other pipelines, wrappers, modules and kernels, each as a run with hot/cold tables.

An entry is a function of the rank and of whose tables it is to take; it returns what TorchRec's own
run must return too, or raises. Pipelines that need a GPU run beside TorchRec's own on the CPU with
streams that do nothing: what they compute is compared, not how their streams wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed import train_pipeline as pipelines
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import HybridEvalDMP
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.shard import shard, shard_modules
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.train_pipeline import experimental_pipelines as experimental
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

from tests.sharding.jobs import RowWiseOnCpuSharder, load_whole, local_shards, result_of_module
from tests.support.placing import CPU, distribute, place, world_env
from tests.train_pipeline import feature_cells
from tests.train_pipeline.feature_cells import MODULES, Feature, batch_of, build, dense_optimizer
from tests.train_pipeline.features import managed_collision_sharders, managed_ids
from tests.train_pipeline.runs import run_to_the_end
from torchrec_picasso import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
    HotColdParams,
    InterleavedTrainPipeline,
    hot_cold_planner,
)

NUM_STEPS = 4
KINDS = ("bags", "sequences")
ALIKE = Feature("any", is_placed_alike=True)

Run = Callable[[int, bool], Any]
"""Of the rank, and whether tables are hot/cold."""


@dataclass(frozen=True)
class Entry:
    """A line of the page's last table."""

    name: str
    run: Run
    on_idle_streams: bool = False
    """Whether TorchRec's own run fails on the CPU but for streams that do nothing."""
    is_ours_alone: bool = False
    """Whether it asks for hot/cold tables by name, so that TorchRec has nothing to run."""


class _Stream:
    device = CPU

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...


def read_tracker(tracker: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Ids and states that a delta tracker has of each table, by id."""
    found = {}
    for name, rows in sorted(tracker.get_unique().items()):
        order = rows.ids.argsort()
        states = None if rows.states is None else rows.states[order].detach().clone()
        found[name] = rows.ids[order].clone(), states
    return found


@contextlib.contextmanager
def idle_streams() -> Iterator[None]:
    """Lets code for a GPU's streams run on the CPU, all in one order."""

    def stream(*args: Any, **kwargs: Any) -> _Stream:
        return _Stream()

    with contextlib.ExitStack() as patches:
        for module in (torch.cuda, torch.cpu):
            for name, idle in (
                ("current_stream", stream),
                ("Stream", stream),
                ("Event", _Event),
                ("stream", contextlib.nullcontext),
            ):
                patches.enter_context(mock.patch.object(module, name, idle))
        patches.enter_context(mock.patch.object(torch, "Event", _Event))
        patches.enter_context(
            mock.patch.object(torch.Tensor, "record_stream", mock.Mock(), create=True)
        )
        yield


def _left(model: Any, outputs: Sequence[Tensor]) -> Any:
    result = result_of_module(model, [], MODULES)
    return list(outputs), result.weights, result.states, result.dense


def _pipeline(make: Callable[..., Any], *, evaluates: bool = False) -> Run:
    """Trains or evaluates both kinds of collections."""

    def run(rank: int, is_ours: bool) -> Any:
        left = []
        for kind in KINDS:
            model = build(ALIKE, kind, is_ours).train(not evaluates)
            pipeline = make(model, dense_optimizer(model), CPU)
            batches = iter([batch_of(ALIKE, rank, step, True) for step in range(NUM_STEPS)])
            with torch.set_grad_enabled(not evaluates):
                left.append(_left(model, run_to_the_end(pipeline, batches)))
        return left

    return run


def _prefetching(model: nn.Module, dense: Any, device: torch.device) -> Any:
    pipeline = pipelines.PrefetchTrainPipelineSparseDist(model, dense, device)
    pipeline._data_dist_stream = pipeline._prefetch_stream = _Stream()  # else it prefetches nothing
    pipeline._default_stream = pipeline._memcpy_stream = _Stream()
    return pipeline


def _compiled(rank: int, is_ours: bool) -> Any:
    """Compiles from the second batch on; TorchRec's pipeline not at all: it takes half a minute."""

    def make(model: nn.Module, dense: Any, device: torch.device) -> Any:
        first = 1 if is_ours else NUM_STEPS
        how = pipelines.TorchCompileConfig(backend="eager", compile_on_iter=first)
        return pipelines.TrainPipelinePT2(model, dense, device, how)

    return _pipeline(make)(rank, is_ours)


def _compiled_autograd(rank: int, is_ours: bool) -> Any:
    """With the setting that TorchRec's run asks for beside DistributedDataParallel."""

    def make(model: Any, dense: Any, device: torch.device) -> Any:
        model._compiled_autograd_options = {"backend": "eager", "fullgraph": False}
        return pipelines.TrainPipelineSparseDistCompAutograd(model, dense, device)

    config, logs = torch._dynamo.config, torch._logging
    with (
        mock.patch.object(config, "optimize_ddp", "python_reducer"),
        mock.patch.object(logs, "set_logs"),  # the pipeline turns all of them on
    ):
        return _pipeline(make)(rank, is_ours)


class _Staged:
    """TorchRec's pipeline of stages, with the plain loop that it prepares batches for."""

    def __init__(self, model: nn.Module, dense: torch.optim.Optimizer, device: Any) -> None:
        self._model, self._dense = model, dense
        exchange = pipelines.SparseDataDistUtil(model, torch.cpu.Stream())
        self._stages = pipelines.StagedTrainPipeline(
            [
                train_pipelines.PipelineStage(
                    name="exchange of ids",
                    runnable=exchange.start_sparse_data_dist,
                    stream=exchange.data_dist_stream,
                    fill_callback=exchange.wait_sdd_fill_callback,
                )
            ]
        )

    def progress(self, batches: Iterator[Any]) -> Tensor:
        batch = self._stages.progress(batches)
        if batch is None:
            raise StopIteration
        self._dense.zero_grad()
        loss, output = self._model(batch)
        loss.backward()
        self._dense.step()
        return output


def _accumulating(ours: bool, num_micro_batches: int | None = None, steps_before: int = 0) -> Run:
    """Two batches a step of the dense optimizer, from the start or in the middle of a run."""

    def run(rank: int, is_ours: bool) -> Any:
        model = build(ALIKE, "bags", is_ours)
        dense = dense_optimizer(model)
        pipeline: Any = pipelines.TrainPipelineSparseDist(model, dense, CPU)
        if ours and is_ours:
            pipeline = InterleavedTrainPipeline(
                model, dense, CPU, num_micro_batches=num_micro_batches, loss_reduction="sum"
            )
        batches = iter([batch_of(ALIKE, rank, step, True) for step in range(8)])
        outputs = [pipeline.progress(batches) for _ in range(steps_before)]
        config = pipelines.GradientAccumulationConfig(is_enabled=True, num_steps=2)
        wrapped = pipelines.GradientAccumulationWrapper(pipeline, dense, model, config)
        return _left(model, [*outputs, *run_to_the_end(wrapped, batches)])

    return run


def _hybrid_eval(rank: int, is_ours: bool) -> Any:
    with mock.patch.object(feature_cells, "DistributedModelParallel", HybridEvalDMP):
        model = build(ALIKE, "bags", is_ours)
    model.eval().to(CPU)
    with torch.no_grad():
        return [model(batch_of(ALIKE, rank, step, True)) for step in range(2)]


def _tracked(kind: str, mode: TrackingMode) -> Run:
    """Returns what TorchRec's delta tracker says after each step, of one table."""
    feature = replace(ALIKE, tables=ALIKE.tables[:1])

    def run(rank: int, is_ours: bool) -> Any:
        model = build(feature, kind, is_ours)
        tracker: Any = model.init_torchrec_delta_tracker(DeltaTrackerConfig(tracking_mode=mode))
        pipeline = pipelines.TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
        batches = iter([batch_of(feature, rank, step, True) for step in range(NUM_STEPS)])
        tracked = []
        for _ in range(NUM_STEPS):
            pipeline.progress(batches)
            tracked.append(read_tracker(tracker))
        return tracked

    return run


TABLE = {"name": "t_a", "embedding_dim": 8, "num_embeddings": 30, "feature_names": ["f"]}
OURS, OURS_OF_SEQUENCES = HotColdEmbeddingBagCollectionSharder, HotColdEmbeddingCollectionSharder
HOT = {"t_a": HotColdParams(hot_rows=[0])}

Make = Callable[[], Any]


class _One(nn.Module):
    """A model of one module."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: Any) -> Any:
        return self.tables(features)


def _as_placed(make: Make, sharder: Make, kernel: str = "fused") -> Run:
    """Shards a module whose table a plan made by hand marks."""

    def run(rank: int, is_ours: bool) -> Any:
        module = make()
        plan = place(module, sharder(), {"t_a": row_wise()}, HOT)
        plan["t_a"].compute_kernel = kernel
        distribute(_One(module), {"tables": plan}, [sharder()])

    return run


def _as_planned(make: Make, sharder: Make) -> Run:
    """Plans a module whose table is named in ``hot_rows``."""

    def run(rank: int, is_ours: bool) -> Any:
        topology = Topology(world_size=2, compute_device="cpu")
        planner = hot_cold_planner(topology, hot_rows={"t_a": 1}, batch_size=8)
        planner.plan(_One(make()), [sharder()])

    return run


def _bags(**flags: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[EmbeddingBagConfig(**TABLE, **flags)], device=CPU)


def _managed() -> nn.Module:
    bags = _bags()
    configs = bags.embedding_bag_configs()
    managed = ManagedCollisionCollection({"t_a": managed_ids(30, buckets=2)}, configs)
    return ManagedCollisionEmbeddingBagCollection(bags, managed)


def _managed_sharder() -> Any:
    return managed_collision_sharders(OURS())[ManagedCollisionEmbeddingBagCollection]


def _pec() -> nn.Module:
    tables = [EmbeddingConfig(**TABLE)]
    return PECEmbeddingCollection(EmbeddingCollection(tables=tables, device=CPU))


def _pruned() -> nn.Module:
    itep = GenericITEPModule({"t_a": 60}, lookups=[])
    return ITEPEmbeddingBagCollection(_bags(), itep)


def _fused() -> nn.Module:
    return FusedEmbeddingBagCollection(
        [EmbeddingBagConfig(**TABLE)],
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1},
        device=CPU,
    )


def _by_shard_modules(rank: int, is_ours: bool) -> Any:
    """Without DistributedModelParallel; a step of SGD in the tables."""
    sharder = (OURS if is_ours else RowWiseOnCpuSharder)()
    torch.manual_seed(0)
    model = _One(_bags())
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plan = place(model.tables, sharder, {"t_a": row_wise()}, HOT if is_ours else None)
    plans = ShardingPlan(plan={"tables": plan})
    sharded: Any = shard_modules(model, world_env(), CPU, plan=plans, sharders=[sharder])
    load_whole(sharded, start)
    outputs = []
    for step in range(2):
        features = batch_of(replace(ALIKE, tables=ALIKE.tables[:1]), rank, step, True)
        pooled = sharded(features.sparse_features)["f"]
        pooled.square().sum().backward()
        outputs.append(pooled.detach())
    return outputs, [local_shards(value) for value in sharded.state_dict().values()]


def _by_shard(rank: int, is_ours: bool) -> Any:
    module, sharder = _bags(), OURS()
    shard(module, place(module, sharder, {"t_a": row_wise()}, HOT), world_env(), CPU, sharder)


def _reshard(rank: int, is_ours: bool) -> Any:
    model = build(ALIKE, "bags", True)
    model.reshard({"tables": (0.0, {"t_a": model.plan.plan["tables"]["t_a"]})}, "tables")


MODULES_AROUND: Mapping[str, tuple[Make, Make]] = {
    "managed collision": (_managed, _managed_sharder),
    "ITEP": (_pruned, lambda: ITEPEmbeddingBagCollectionSharder(OURS())),
    "PEC": (_pec, lambda: PECEmbeddingCollectionSharder(OURS_OF_SEQUENCES())),
}
"""Modules of TorchRec's around tables of ours, and their sharders with a sharder of ours."""

MODULES_OF_THEIR_OWN: Mapping[str, tuple[Make, Make]] = {
    "FusedEmbeddingBagCollection": (_fused, FusedEmbeddingBagCollectionSharder),
    "EmbeddingTower": (lambda: EmbeddingTower(_bags(), nn.Linear(8, 8)), EmbeddingTowerSharder),
}


SURFACE: Sequence[Entry] = (
    Entry("TrainPipelineBase", _pipeline(pipelines.TrainPipelineBase)),
    Entry("TrainPipelineSparseDistLite", _pipeline(train_pipelines.TrainPipelineSparseDistLite)),
    Entry("TrainPipelineSparseDistT", _pipeline(experimental.TrainPipelineSparseDistT)),
    Entry("TrainEvalHybridPipelineBase", _pipeline(experimental.TrainEvalHybridPipelineBase)),
    Entry("EvalPipelineSparseDist", _pipeline(pipelines.EvalPipelineSparseDist, evaluates=True)),
    *(
        Entry(name, run, on_idle_streams=True)
        for name, run in (
            ("TrainPipelineFusedSparseDist", _pipeline(pipelines.TrainPipelineFusedSparseDist)),
            (
                "TrainPipelineSemiSync",
                _pipeline(partial(train_pipelines.TrainPipelineSemiSync, start_batch=0)),
            ),
            ("PrefetchTrainPipelineSparseDist", _pipeline(_prefetching)),
            ("StagedTrainPipeline", _pipeline(_Staged)),
            (
                "EvalPipelineFusedSparseDist",
                _pipeline(train_pipelines.EvalPipelineFusedSparseDist, evaluates=True),
            ),
        )
    ),
    Entry("EvalPipelineCPUSparse", _pipeline(experimental.EvalPipelineCPUSparse, evaluates=True)),
    *(
        Entry(name, _pipeline(partial(getattr(experimental, name), site_fqn="tables")))
        for name in (
            "TrainPipelineSparseDistEmbStash",
            "TrainPipelineSparseDistOptStash",
            "TrainPipelinePrefetchEMS",
        )
    ),
    Entry("GradientAccumulationWrapper, SparseDist", _accumulating(False)),
    Entry("GradientAccumulationWrapper, 1 micro-batch", _accumulating(True, 1)),
    Entry("GradientAccumulationWrapper, 3 micro-batches", _accumulating(True, 3)),
    Entry("GradientAccumulationWrapper, around SparseDist in a run", _accumulating(False, None, 2)),
    Entry("GradientAccumulationWrapper, 1 micro-batch, in a run", _accumulating(True, 1, 2)),
    Entry("GradientAccumulationWrapper, 3 micro-batches, in a run", _accumulating(True, 3, 2)),
    Entry("HybridEvalDMP", _hybrid_eval),
    Entry("delta tracker, bags, ids", _tracked("bags", TrackingMode.ID_ONLY)),
    Entry("delta tracker, bags, row-wise Adagrad", _tracked("bags", TrackingMode.ROWWISE_ADAGRAD)),
    Entry("delta tracker, sequences, ids", _tracked("sequences", TrackingMode.ID_ONLY)),
    Entry("delta tracker, sequences, rows", _tracked("sequences", TrackingMode.EMBEDDING)),
    Entry("shard_modules", _by_shard_modules),
    Entry("shard", _by_shard, is_ours_alone=True),
    Entry("DistributedModelParallel.reshard", _reshard, is_ours_alone=True),
    *(
        Entry(f"{flag}, {how}", run(partial(_bags, **{flag: True}), OURS), is_ours_alone=True)
        for flag in ("use_virtual_table", "enable_embedding_update", "stash_weights")
        for how, run in (("planned", _as_planned), ("placed", _as_placed))
    ),
    *(
        Entry(f"kernel {kernel}", _as_placed(_bags, OURS, kernel), is_ours_alone=True)
        for kernel in ("fused_uvm_caching", "dram_virtual_table", "key_value", "fused_triton")
    ),
    *(
        Entry(f"{what}, {how}", run(*module), is_ours_alone=True)
        for what, module in MODULES_AROUND.items()
        for how, run in (("planned", _as_planned), ("placed", _as_placed))
    ),
    *(
        Entry(f"{what}, planned", _as_planned(*module), is_ours_alone=True)
        for what, module in MODULES_OF_THEIR_OWN.items()
    ),
    Entry("TrainPipelinePT2", _compiled),
    Entry("TrainPipelineSparseDistCompAutograd", _compiled_autograd, is_ours_alone=True),
)
