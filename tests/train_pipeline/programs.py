"""Programs: a small model and what is done around it, trained by TorchRec's pipeline and by ours.

Tables are stock there and hot/cold here; weights and batches are equal, and large enough for
micro-batches to be tried by default. The programs of a module's ``PROGRAMS`` share one run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.sharding.jobs import Result, Table, load_whole, local_shards, whole
from tests.support.placing import CPU, distribute, place
from tests.support.shared_run import run_once
from tests.support.tables import bags_of, sequences_of
from tests.train_pipeline.runs import ATOL, RTOL
from torchrec_picasso import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdParams,
    InterleavedTrainPipeline,
)
from torchrec_picasso.errors import CompatError

DIM, ROWS, MAX_LENGTH, SAMPLES = 4, 30, 4, 256
FEATURES = ("f", "g", "h")


def _tables(features: Sequence[str]) -> list[Table]:
    return [Table(f"t_{name}", DIM, ROWS, (name,)) for name in features]


def ebc(*features: str, weighted: bool = False) -> EmbeddingBagCollection:
    return bags_of(_tables(features), is_weighted=weighted)


def processed(*features: str) -> FeatureProcessedEmbeddingBagCollection:
    processors = {name: PositionWeightedModule(max_feature_length=MAX_LENGTH) for name in features}
    tables = ebc(*features, weighted=True)
    return FeatureProcessedEmbeddingBagCollection(tables, nn.ModuleDict(processors))


def sequences(*features: str) -> EmbeddingCollection:
    return sequences_of(_tables(features))


def build(
    model: nn.Module,
    stock: Collection[str] | None,
    optimizer: Any = torchrec.optim.RowWiseAdagrad,
    optimizer_kwargs: Any = None,
    is_wrapped: bool = True,
    wrapper: DataParallelWrapper | None = None,
    planned: int | None = None,
) -> DistributedModelParallel:
    """Shards a model; bags are hot/cold but for the listed tables, or all TorchRec's (``None``)."""
    hot_cold = HotColdEmbeddingBagCollectionSharder()
    sharders = {
        EmbeddingBagCollection: EmbeddingBagCollectionSharder() if stock is None else hot_cold,
        FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder(),
        EmbeddingCollection: EmbeddingCollectionSharder(),
    }
    params = HotColdParams(hot_rows=[0, 3], num_micro_batches=planned)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plans: dict[str, Any] = {}
    for name, module in model.named_children():
        if type(module) not in sharders:
            continue
        named = {n: p for n, p in module.named_parameters() if ".t_" in n}
        tables = [n.split(".")[-2] for n in named]
        apply_optimizer_in_backward(optimizer, named.values(), optimizer_kwargs or {"lr": 0.1})
        may_be_hot = type(module) is EmbeddingBagCollection
        is_row_wise = may_be_hot and stock is not None
        plans[name] = place(
            module,
            hot_cold if may_be_hot else sharders[type(module)],
            {t: row_wise() if is_row_wise else table_wise(rank=0) for t in tables},
            {t: params for t in tables if stock is not None and may_be_hot and t not in stock},
        )
    sharded = distribute(
        model,
        plans,
        sharders.values(),
        init_data_parallel=is_wrapped,
        data_parallel_wrapper=wrapper,
    )
    load_whole(sharded, start)
    return sharded


def batch_of(
    rank: int, step: int, num_samples: int = SAMPLES, features: Sequence[str] = FEATURES
) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, MAX_LENGTH, (len(features), num_samples), generator=generator)
    total = int(lengths.sum())
    values = (torch.rand(total, generator=generator) ** 2 * ROWS).long()
    return Batch(
        dense_features=torch.rand(num_samples, DIM, generator=generator),
        sparse_features=KeyedJaggedTensor(
            keys=list(features), values=values, lengths=lengths.flatten()
        ),
        labels=torch.rand(num_samples, generator=generator),
    )


def dense_optimizer(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    parameters = [p for name, p in model.named_parameters() if "t_" not in name]
    return torch.optim.SGD(parameters, lr=lr)


def _values(model: Any) -> dict[str, Any]:
    """Weights and optimizer state by name."""
    values = dict(model.state_dict())
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"{name}/{key}": value for key, value in states.items()}
    return values


def left_behind(model: nn.Module) -> dict[str, Any]:
    """Weights and optimizer state by name, as local shards."""
    return {
        name: [tensor for _, tensor in local_shards(value) if tensor.numel()]
        for name, value in _values(model).items()
        if isinstance(value, (Tensor, ShardedTensor))
    }


STEPS, WIDTH = 5, 8
EXACT = {"rtol": RTOL, "atol": ATOL}
BFLOAT16 = {"rtol": 2.0**-6, "atol": 2.0**-6}
"""Its rounding in a few layers."""


class Model(nn.Module):
    """Tables, and a dense part that TorchRec's tracer does not enter."""

    def __init__(self, head: type[Head]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make()
        self.head = head()

    def make(self) -> None:
        self.ebc = ebc(*FEATURES)

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(features)

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        return self.head(self.look_up(batch.sparse_features), batch)


class Head(nn.Module):
    """A mean over samples, of a tower that subclasses change."""

    is_ours = True

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM * (1 + len(FEATURES)), WIDTH)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, pooled: Any, batch: Batch) -> tuple[Any, Any]:
        values = [batch.dense_features, *(pooled[name] for name in FEATURES)]
        out = self.logits(torch.cat(values, dim=1))
        return self.loss(out, batch), self.output(out, batch)

    def logits(self, x: Tensor) -> Tensor:
        return self.tower(x).squeeze(1)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(self.hidden(x)))

    def loss(self, out: Tensor, batch: Batch) -> Any:
        return ((out - batch.labels) ** 2).mean()

    def output(self, out: Tensor, batch: Batch) -> Any:
        return out.detach()


def changed(base: type[Head] = Head, **methods: Any) -> type[Head]:
    """A head with other methods, which get it first."""
    return type("Changed", (base,), methods)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model and what a program does around it."""

    head: type[Head] = Head
    model: Callable[[type[Head]], nn.Module] = Model
    in_summary: Sequence[str] = ()
    """Parts of the pipeline's summary."""
    wrapper: Callable[[], DataParallelWrapper | None] = lambda: None
    prepare: Callable[[Any], Any] = lambda model: None
    pipeline: Callable[[type], type] = lambda base: base
    before_step: Callable[[Any, int], None] = lambda model, step: None
    batch: Callable[[int, int], Batch] = lambda rank, step: batch_of(rank, step)
    stock: Sequence[str] = ()
    """Tables that are not hot/cold."""
    is_wrapped: bool = True
    is_inside: bool = False
    """Whether the pipeline gets the model without its wrapper."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around each step."""
    tolerance: Mapping[str, float] = field(default_factory=lambda: EXACT)
    refusal: str = ""
    """Of an error; none = it trains in any number of micro-batches."""
    refused: Sequence[int | None] = (4,)
    """Numbers of micro-batches that are refused so."""
    numbers: Sequence[int | None] = (None, 4)
    """Of micro-batches, to train in; by default the first steps are in one."""
    fails: bool = False
    """Whether stock raises; then ours raises the same."""
    planned: int | None = None
    """Micro-batches that the plan was priced for."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = dense_optimizer
    options: dict[str, Any] = field(default_factory=dict)


def cases_of(programs: Mapping[str, Program]) -> Any:
    """Parametrizes a test with every program and its numbers of micro-batches."""
    cases = [(name, number) for name, program in programs.items() for number in program.numbers]
    return pytest.mark.parametrize(("name", "num_micro_batches"), cases)


def assert_as_stock(module: str, name: str, num_micro_batches: int | None) -> None:
    """A program of a module trains as under TorchRec, or is refused as it says, on all ranks."""
    by_rank, program = run_once(_train_all, 2, module), import_module(module).PROGRAMS[name]
    for results in by_rank:
        found, expected = results[name, num_micro_batches], results[name, "stock"]
        assert isinstance(expected, str) == program.fails
        if program.refusal and num_micro_batches in program.refused:
            assert program.refusal in found
            assert found == by_rank[0][name, num_micro_batches]
        elif program.fails or isinstance(found, str):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected, **program.tolerance)


def _train_all(rank: int, world_size: int, module: str) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for name, program in import_module(module).PROGRAMS.items():
        for number in ("stock", *program.numbers):
            try:
                results[name, number] = _train(program, rank, number)
            except CompatError as error:
                results[name, number] = str(error)
            except Exception as error:
                if not program.fails:
                    error.add_note(f"{name}, {number} micro-batches")
                    raise
                results[name, number] = str(error)
    return results


def _train(program: Program, rank: int, number: Any) -> Any:
    """Outputs of all steps, and what is left behind."""
    is_ours = number != "stock"
    model: Any = program.model(program.head)
    model.head.is_ours = is_ours
    sharded = build(
        model,
        program.stock if is_ours else None,
        is_wrapped=program.is_wrapped,
        wrapper=program.wrapper(),
        planned=program.planned,
    )
    program.prepare(sharded)
    kind = program.pipeline(InterleavedTrainPipeline if is_ours else TrainPipelineSparseDist)
    options = {"num_micro_batches": number, **program.options} if is_ours else {}
    trained = sharded.module if program.is_inside else sharded
    pipeline = kind(trained, program.optimizer(sharded), CPU, **options)
    batches = iter([program.batch(rank, step) for step in range(STEPS)])
    outputs = []
    with suppress(StopIteration):
        for step in range(STEPS):
            program.before_step(sharded, step)
            with program.within():
                outputs.append(pipeline.progress(batches))
    if is_ours:
        assert all(part in pipeline.summary() for part in program.in_summary), pipeline.summary()
    return outputs, gathered(sharded)


def gathered(model: Any) -> dict[str, Tensor]:
    """Tables and their optimizer state of all ranks, whatever the placement; the rest of each."""
    mine = {
        name if isinstance(value, ShardedTensor) else f"{name} of {dist.get_rank()}": value
        for name, value in _values(model).items()
    }
    shards = {name: local_shards(value) for name, value in mine.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, Result([], {}, shards, {}, []))
    return whole(every, "states")
