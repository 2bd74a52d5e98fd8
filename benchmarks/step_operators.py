"""Operators and collectives of a training step, by driver: what the host has to launch.

    python -m benchmarks.step_operators
    python -m benchmarks.step_operators --tables 200 --micro-batches 1 2 4 8

A DLRM with small dims is trained on gloo ranks of this machine: stock table-wise and hot/cold under
``TrainPipelineSparseDist``, and hot/cold under ``InterleavedTrainPipeline``. Counted are steps in
the middle of a run on rank 0. Times on a shared machine say little; counts are the same everywhere.
The profile goes on until the data has ended: a message of gloo ends in the profile that it was
started in, so one that outlived it would write into memory that is no longer the profile's.

An operator is one event of the PyTorch profiler whose name has a namespace, such as
``aten::index_select``: those called by other operators count as well, and apart from them those
called by none (``top level``), which is about what Python or autograd calls. Collectives are
``c10d`` operators; an all-to-all made of messages counts one per message and direction.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_picasso import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdParams,
    InterleavedTrainPipeline,
)
from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.app.launch.run_ranks import run_ranks

__all__ = ["Question", "StepOperators", "count_operators", "main"]

_NUM_DENSE = 13
_NUM_WARM, _NUM_COUNTED, _NUM_LAST = 4, 3, 3
_COUNTED = "a counted step"
_TIMEOUT_S = 600.0
_NAMESPACES = ("aten", "fbgemm", "c10d", "torchrec", "profiler")
STOCK, PLAIN = "stock table-wise, SparseDist", "hot/cold, SparseDist"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is trained.

    Args:
        tables: Tables, one feature each.
        dim: Columns.
        rows: Rows of each table.
        hot_rows: Hot rows of each table.
        batch_size: Samples per rank.
        ranks: Processes.
        micro_batches: Settings of the interleaved pipeline, each without and with lookahead.
    """

    tables: int = 26
    dim: int = 8
    rows: int = 1000
    hot_rows: int = 50
    batch_size: int = 128
    ranks: int = 2
    micro_batches: tuple[int, ...] = (1, 4)


@dataclass(frozen=True, kw_only=True)
class StepOperators:
    """Counts of one step, mean of some.

    Args:
        driver: Who trains.
        operators: Operators, nested ones too.
        top_level: Those that no other operator calls.
        collectives: ``c10d`` operators.
        by_namespace: Operators by the namespace they are in.
        most_called: The operators called most.
    """

    driver: str
    operators: float
    top_level: float
    collectives: float
    by_namespace: dict[str, float]
    most_called: dict[str, float]


def count_operators(question: Question) -> list[StepOperators]:
    """Counts the operators of a step of every driver on rank 0.

    Args:
        question: What is trained.
    """
    return run_ranks(_count_on_rank, question.ranks, question, timeout_s=_TIMEOUT_S)[0]


def _count_on_rank(rank: int, world_size: int, question: Question) -> list[StepOperators]:
    found = [_of_driver(STOCK, question, _sparse_dist(*_model(question, ours=False)), rank)]
    found.append(_of_driver(PLAIN, question, _sparse_dist(*_model(question, ours=True)), rank))
    for num_micro_batches, lookahead in itertools.product(question.micro_batches, (False, True)):
        model, optimizer = _model(question, ours=True)
        pipeline = InterleavedTrainPipeline(
            model,
            optimizer,
            torch.device("cpu"),
            num_micro_batches=num_micro_batches,
            lookahead=lookahead,
        )
        name = f"hot/cold, interleaved K={num_micro_batches}{' lookahead' if lookahead else ''}"
        found.append(_of_driver(name, question, pipeline, rank))
    return found


def _sparse_dist(model: DistributedModelParallel, optimizer: torch.optim.Optimizer) -> Any:
    return TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))


def _of_driver(driver: str, question: Question, pipeline: Any, rank: int) -> StepOperators:
    batches = itertools.islice(_batches(question, rank), _NUM_WARM + _NUM_COUNTED + _NUM_LAST)
    for _ in range(_NUM_WARM):
        pipeline.progress(batches)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(_NUM_COUNTED):
            with record_function(_COUNTED):
                pipeline.progress(batches)
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(batches)
    return _counted(driver, profiler.events() or [])


def _counted(driver: str, events: Sequence[Any]) -> StepOperators:
    steps = [event for event in events if event.name == _COUNTED]
    assert len(steps) == _NUM_COUNTED
    names: Counter[str] = Counter()
    top_level = 0
    for event in events:
        namespace, found, _ = event.name.partition("::")
        if found and namespace in _NAMESPACES and any(_is_within(event, step) for step in steps):
            names[event.name] += 1
            top_level += not _is_called_by_operator(event)
    by_namespace: Counter[str] = Counter()
    for name, count in names.items():
        by_namespace[name.partition("::")[0]] += count
    return StepOperators(
        driver=driver,
        operators=_per_step(sum(names.values())),
        top_level=_per_step(top_level),
        collectives=_per_step(by_namespace["c10d"]),
        by_namespace={name: _per_step(n) for name, n in sorted(by_namespace.items())},
        most_called={name: _per_step(n) for name, n in names.most_common(12)},
    )


def _is_within(event: Any, step: Any) -> bool:
    return (
        event.thread == step.thread
        and step.time_range.start <= event.time_range.start < step.time_range.end
    )


def _is_called_by_operator(event: Any) -> bool:
    caller = event.cpu_parent
    while caller is not None:
        if caller.name.partition("::")[0] in _NAMESPACES:
            return True
        caller = caller.cpu_parent
    return False


def _per_step(count: float) -> float:
    return round(count / _NUM_COUNTED, 1)


def _model(
    question: Question, *, ours: bool
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{index}",
                embedding_dim=question.dim,
                num_embeddings=question.rows,
                feature_names=[f"f{index}"],
            )
            for index in range(question.tables)
        ],
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=collection,
            dense_in_features=_NUM_DENSE,
            dense_arch_layer_sizes=[16, question.dim],
            over_arch_layer_sizes=[16, 1],
        )
    )
    sharder_class = HotColdEmbeddingBagCollectionSharder if ours else EmbeddingBagCollectionSharder
    sharder, world_size = sharder_class(), dist.get_world_size()
    plan = construct_module_sharding_plan(
        collection,
        {
            f"t{index}": row_wise() if ours else table_wise(rank=index % world_size)
            for index in range(question.tables)
        },
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    if ours:
        for index in range(question.tables):
            plan[f"t{index}"].cache_params = HotColdParams(hot_rows=range(question.hot_rows))
    name = next(name for name, module in model.named_modules() if module is collection)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={name: plan}),
        sharders=[sharder],
    )
    dense = [p for name, p in sharded.named_parameters() if "embedding_bags" not in name]
    return sharded, torch.optim.SGD(dense, lr=0.05)


def _batches(question: Question, rank: int) -> Iterator[Batch]:
    """Endless one-hot batches, skewed to low ids."""
    generator = torch.Generator().manual_seed(rank)
    size, tables = question.batch_size, question.tables
    while True:
        ids = torch.rand(tables * size, generator=generator) ** 3 * question.rows
        yield Batch(
            dense_features=torch.rand(size, _NUM_DENSE, generator=generator),
            sparse_features=KeyedJaggedTensor(
                keys=[f"f{index}" for index in range(tables)],
                values=ids.long(),
                lengths=torch.ones(tables * size, dtype=torch.int32),
            ),
            labels=torch.randint(0, 2, (size,), generator=generator).float(),
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line per driver."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usual = Question()
    for name in ("tables", "dim", "rows", "hot_rows", "batch_size", "ranks"):
        option = f"--{name.replace('_', '-')}"
        usually = getattr(usual, name)
        parser.add_argument(option, type=int, default=usually, metavar="N", help=f"({usually})")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=usual.micro_batches, metavar="K"
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--most-called", action="store_true", help="name operators called most")
    args = vars(parser.parse_args(argv))
    out, most_called = args.pop("out"), args.pop("most_called")
    question = Question(**{**args, "micro_batches": tuple(args["micro_batches"])})
    found = count_operators(question)
    print(f"{question.tables} tables of dim {question.dim}, {question.ranks} ranks, one step:")
    print(f"{'':36}  operators  top level  collectives")
    for of in found:
        print(f"{of.driver:36}  {of.operators:9.0f}  {of.top_level:9.0f}  {of.collectives:11.1f}")
        if most_called:
            print("    " + ", ".join(f"{name} {n:g}" for name, n in of.most_called.items()))
    if out:
        with open(out, "w") as file:
            document = {
                "environment": describe_environment(),
                "question": asdict(question),
                "found": list(map(asdict, found)),
            }
            json.dump(document, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
