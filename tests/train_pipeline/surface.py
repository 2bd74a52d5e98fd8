"""TorchRec's other pipelines, wrappers, modules and kernels, each as a run with hot/cold tables.

An entry is a function of the rank and of whose tables it is to take; it returns what TorchRec's own
run must return too, or raises. Pipelines that need a GPU run beside TorchRec's own on the CPU with
streams that do nothing: what they compute is compared, not how their streams wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec import distributed as trec_dist
from torchrec.distributed import train_pipeline as pipelines
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import HybridEvalDMP
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.shard import shard, shard_modules
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import experimental_pipelines as experimental
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

from tests.sharding.jobs import CPU, RowWiseOnCpuSharder, local_shards, result_of_module
from tests.train_pipeline import feature_cells
from tests.train_pipeline.feature_cells import MODULES, Feature, batch_of, build
from tests.train_pipeline.features import managed_collision_sharders
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


# -- pipelines and wrappers ------------------------------------------------------------------------


def _dense(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for name, p in model.named_parameters() if ".t_" not in name]
    return torch.optim.SGD(weights, lr=0.05)


def _left(model: Any, outputs: Sequence[Tensor]) -> Any:
    result = result_of_module(model, [], MODULES)
    return list(outputs), result.weights, result.states, result.dense


def _pipeline(make: Callable[..., Any], *, evaluates: bool = False) -> Run:
    """Trains or evaluates both kinds of collections."""

    def run(rank: int, is_ours: bool) -> Any:
        left = []
        for kind in KINDS:
            model = build(ALIKE, kind, is_ours).train(not evaluates)
            pipeline = make(model, _dense(model), CPU)
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


def _semi_sync(model: nn.Module, dense: Any, device: torch.device) -> Any:
    return train_pipelines.TrainPipelineSemiSync(model, dense, device, start_batch=0)


def _compiled(rank: int, is_ours: bool) -> Any:
    """Ours compiled from the second batch on; TorchRec's not at all, it takes half a minute."""

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


def _stashing(cls: Any) -> Callable[..., Any]:
    return lambda model, dense, device: cls(model, dense, device, site_fqn="tables")


def _cpu_sparse(model: nn.Module, dense: Any, device: torch.device) -> Any:
    return experimental.EvalPipelineCPUSparse(model, dense, device)


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
        dense = _dense(model)
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
    """What TorchRec's delta tracker says after each step, of one table."""
    feature = replace(ALIKE, tables=ALIKE.tables[:1])

    def run(rank: int, is_ours: bool) -> Any:
        model = build(feature, kind, is_ours)
        tracker: Any = model.init_torchrec_delta_tracker(DeltaTrackerConfig(tracking_mode=mode))
        pipeline = pipelines.TrainPipelineSparseDist(model, _dense(model), CPU)
        batches = iter([batch_of(feature, rank, step, True) for step in range(NUM_STEPS)])
        told = []
        for _ in range(NUM_STEPS):
            pipeline.progress(batches)
            for rows in tracker.get_unique().values():
                order = rows.ids.argsort()
                states = () if rows.states is None else (rows.states[order].detach().clone(),)
                told.append((rows.ids[order], *states))
        return told

    return run


# -- modules, kernels and flags --------------------------------------------------------------------


def _config(**flags: Any) -> EmbeddingBagConfig:
    given = {"name": "t_a", "embedding_dim": 8, "num_embeddings": 30, "feature_names": ["f"]}
    return EmbeddingBagConfig(**{**given, **flags})


class _One(nn.Module):
    """A model of one module."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: Any) -> Any:
        return self.tables(features)


def _as_placed(
    make: Callable[[], nn.Module], sharder: Any, kernel: str = "fused", inner: str = ""
) -> Run:
    """Shards a module whose table a plan made by hand marks."""

    def run(rank: int, is_ours: bool) -> Any:
        module = make()
        plan = construct_module_sharding_plan(
            module,
            {"t_a": row_wise()},
            sharder=sharder(),
            local_size=dist.get_world_size(),
            world_size=dist.get_world_size(),
            device_type="cpu",
        )
        plan["t_a"].compute_kernel = kernel
        plan["t_a"].cache_params = HotColdParams(hot_rows=[0])
        trec_dist.DistributedModelParallel(
            _One(module),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan(plan={"tables": plan}),
            sharders=[sharder()],
        )

    return run


def _as_planned(make: Callable[[], nn.Module], sharder: Any) -> Run:
    """Plans a module whose table is named in ``hot_rows``."""

    def run(rank: int, is_ours: bool) -> Any:
        planner = hot_cold_planner(
            Topology(world_size=2, compute_device="cpu"),
            hot_rows={"t_a": 1},
            batch_size=8,
        )
        planner.plan(_One(make()), [sharder()])

    return run


def _bags(**flags: Any) -> Callable[[], nn.Module]:
    return lambda: EmbeddingBagCollection(tables=[_config(**flags)], device=CPU)


def _sequences() -> EmbeddingCollection:
    config = EmbeddingConfig(name="t_a", embedding_dim=8, num_embeddings=30, feature_names=["f"])
    return EmbeddingCollection(tables=[config], device=CPU)


def _managed() -> nn.Module:
    module = MCHManagedCollisionModule(
        zch_size=30,
        device=CPU,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=2,
        input_hash_size=1000,
        buckets=2,
    )
    bags: Any = _bags()()
    managed = ManagedCollisionCollection({"t_a": module}, bags.embedding_bag_configs())
    return ManagedCollisionEmbeddingBagCollection(bags, managed)


def _pruned() -> nn.Module:
    itep = GenericITEPModule({"t_a": 60}, lookups=[])
    return ITEPEmbeddingBagCollection(_bags()(), itep)


def _fused() -> nn.Module:
    return FusedEmbeddingBagCollection(
        [_config()], optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}, device=CPU
    )


def _by_shard_modules(rank: int, is_ours: bool) -> Any:
    """Without DistributedModelParallel; a step of SGD in the tables."""
    sharder = (HotColdEmbeddingBagCollectionSharder if is_ours else RowWiseOnCpuSharder)()
    torch.manual_seed(0)
    model = _One(_bags()())
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    start = model.tables.embedding_bags["t_a"].weight.detach().clone()
    plan = construct_module_sharding_plan(
        model.tables,
        {"t_a": row_wise()},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    if is_ours:
        plan["t_a"].cache_params = HotColdParams(hot_rows=[0])
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded: Any = shard_modules(
        model, env, CPU, plan=ShardingPlan(plan={"tables": plan}), sharders=[sharder]
    )
    name = "tables.embedding_bags.t_a.weight"
    (piece,) = sharded.state_dict()[name].local_shards()
    first = piece.metadata.shard_offsets[0]
    piece.tensor.detach().copy_(start[first : first + len(piece.tensor)])
    outputs = []
    for step in range(2):
        features = batch_of(replace(ALIKE, tables=ALIKE.tables[:1]), rank, step, True)
        pooled = sharded(features.sparse_features)["f"]
        pooled.square().sum().backward()
        outputs.append(pooled.detach())
    return outputs, local_shards(sharded.state_dict()[name])


def _by_shard(rank: int, is_ours: bool) -> Any:
    sharder = HotColdEmbeddingBagCollectionSharder()
    module = _bags()()
    plan = construct_module_sharding_plan(
        module,
        {"t_a": row_wise()},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    plan["t_a"].cache_params = HotColdParams(hot_rows=[0])
    shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU, sharder)


def _reshard(rank: int, is_ours: bool) -> Any:
    model = build(ALIKE, "bags", True)
    model.reshard({"tables": (0.0, {"t_a": model.plan.plan["tables"]["t_a"]})}, "tables")


def _unlike(what: str) -> tuple[Callable[[], nn.Module], Any]:
    """A module of TorchRec's around tables of ours, and its sharder with a sharder of ours."""
    bags, sequences = HotColdEmbeddingBagCollectionSharder, HotColdEmbeddingCollectionSharder
    found: Mapping[str, tuple[Callable[[], nn.Module], Any]] = {
        "managed collision": (
            _managed,
            lambda: managed_collision_sharders(bags())[ManagedCollisionEmbeddingBagCollection],
        ),
        "ITEP": (_pruned, lambda: ITEPEmbeddingBagCollectionSharder(bags())),
        "PEC": (
            lambda: PECEmbeddingCollection(_sequences()),
            lambda: PECEmbeddingCollectionSharder(sequences()),
        ),
        "FusedEmbeddingBagCollection": (_fused, FusedEmbeddingBagCollectionSharder),
        "EmbeddingTower": (
            lambda: EmbeddingTower(_bags()(), nn.Linear(8, 8)),
            EmbeddingTowerSharder,
        ),
    }
    return found[what]


OURS = HotColdEmbeddingBagCollectionSharder
SURFACE: Sequence[Entry] = (
    Entry("TrainPipelineBase", _pipeline(pipelines.TrainPipelineBase)),
    Entry("TrainPipelineSparseDistLite", _pipeline(train_pipelines.TrainPipelineSparseDistLite)),
    Entry("TrainPipelineSparseDistT", _pipeline(experimental.TrainPipelineSparseDistT)),
    Entry("TrainEvalHybridPipelineBase", _pipeline(experimental.TrainEvalHybridPipelineBase)),
    Entry("EvalPipelineSparseDist", _pipeline(pipelines.EvalPipelineSparseDist, evaluates=True)),
    Entry(
        "TrainPipelineFusedSparseDist",
        _pipeline(pipelines.TrainPipelineFusedSparseDist),
        on_idle_streams=True,
    ),
    Entry("TrainPipelineSemiSync", _pipeline(_semi_sync), on_idle_streams=True),
    Entry("PrefetchTrainPipelineSparseDist", _pipeline(_prefetching), on_idle_streams=True),
    Entry("StagedTrainPipeline", _pipeline(_Staged), on_idle_streams=True),
    Entry(
        "EvalPipelineFusedSparseDist",
        _pipeline(train_pipelines.EvalPipelineFusedSparseDist, evaluates=True),
        on_idle_streams=True,
    ),
    Entry("EvalPipelineCPUSparse", _pipeline(_cpu_sparse, evaluates=True)),
    Entry(
        "TrainPipelineSparseDistEmbStash",
        _pipeline(_stashing(experimental.TrainPipelineSparseDistEmbStash)),
    ),
    Entry(
        "TrainPipelineSparseDistOptStash",
        _pipeline(_stashing(experimental.TrainPipelineSparseDistOptStash)),
    ),
    Entry("TrainPipelinePrefetchEMS", _pipeline(_stashing(experimental.TrainPipelinePrefetchEMS))),
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
        Entry(f"{flag}, {how}", run(_bags(**{flag: True}), OURS), is_ours_alone=True)
        for flag in ("use_virtual_table", "enable_embedding_update", "stash_weights")
        for how, run in (("planned", _as_planned), ("placed", _as_placed))
    ),
    *(
        Entry(f"kernel {kernel}", _as_placed(_bags(), OURS, kernel), is_ours_alone=True)
        for kernel in ("fused_uvm_caching", "dram_virtual_table", "key_value", "fused_triton")
    ),
    *(
        Entry(f"{what}, {how}", run(*_unlike(what)), is_ours_alone=True)
        for what in ("managed collision", "ITEP", "PEC")
        for how, run in (("planned", _as_planned), ("placed", _as_placed))
    ),
    *(
        Entry(f"{what}, planned", _as_planned(*_unlike(what)), is_ours_alone=True)
        for what in ("FusedEmbeddingBagCollection", "EmbeddingTower")
    ),
    Entry("TrainPipelinePT2", _compiled),
    Entry("TrainPipelineSparseDistCompAutograd", _compiled_autograd, is_ours_alone=True),
)
