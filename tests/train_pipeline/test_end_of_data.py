"""Ranks with different numbers of batches: as the plain loop given empty ones; all end at once."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from tests.sharding.jobs import ODD, PLAIN, Job, build, result_of
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import (
    Run,
    batches_of,
    compare_runs,
    empty_of,
    make_driver,
    pipeline_of,
    plain_run,
    plain_steps,
    run_to_the_end,
)
from tests.train_pipeline.test_refusals import Changing
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.wire_meter import WireMeter
from torchrec_picasso.train_pipeline.options import PipelineOptions
from torchrec_picasso.train_pipeline.stock_steps import StockSteps

JOBS = {
    "hot_cold": Job(placement={"*": 2, "one_row": 1}, tables=ODD),
    "waves": Job(placement={"*": 2, "one_row": 1}, tables=ODD, waves={"a": 1, "b": 1}),
    "mixed": Job(placement={"*": 2, "b": "table_wise"}, tables=PLAIN),
    "stock": Job(placement={"*": "table_wise"}, tables=PLAIN),
    "bags": Job(placement={"*": "bags", "b": "table_wise"}, tables=PLAIN),
    "mean": Job(placement={"*": 2}, tables=PLAIN),
    "by_host": Job(placement={"*": 2}, by_host=("*",), batch_sizes=(16, 9, 3, 5)),
    "changing": Job(placement={"*": 2}, tables=PLAIN),
    "stock_mean": Job(placement={"*": 2, "c": "row_wise"}, tables=PLAIN),
}
CASES = [
    (name, counts, num_micro_batches)
    for name, counts in [
        ("hot_cold", (5, 3)),
        ("hot_cold", (0, 3)),
        ("hot_cold", (2, 2)),
        ("hot_cold", (1, 4, 0)),
        ("waves", (2, 4)),
        ("mixed", (2, 5)),
        ("stock", (4, 2)),
        ("mean", (2, 4)),
        ("by_host", (5, 3, 0, 2)),
        ("by_host", (0, 0, 0, 3)),
        ("by_host", (4, 4, 4, 4)),
        ("stock_mean", (3, 3)),  # TorchRec has no means of no samples, so no rank may need any
    ]
    for num_micro_batches in (1, 4)
]
CASES += [("changing", (4, 2), None)]
CASES += [("bags", counts, 2) for counts in ((2, 5), (3, 0))]  # depth first
"""Job, batches of each rank and micro-batches; a rank that has no batch is told by the others what
an empty one is, also of tables that are not pipelined, whose own exchange needs it."""


def _build(name: str, rank: int, world_size: int) -> DistributedModelParallel:
    model = build(JOBS[name], rank, world_size)
    if name == "mean":
        model.module.forward = partial(_mean_forward, model.module)
    if name == "changing":
        model.module.__class__ = Changing
    return model


def _mean_forward(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """With a loss that is not a number where there are no samples."""
    pooled = model.ebc(batch.sparse_features)
    out = model.over(torch.cat([pooled[key] for key in model.keys], dim=1)).squeeze(1)
    return ((out - batch.labels) ** 2).mean(), out.detach()


def _padded(job: Job, rank: int, counts: tuple[int, ...]) -> list[Batch]:
    """A rank's batches, and empty ones until the last rank's data ends."""
    missing = max(counts) - counts[rank]
    return [*batches_of(job, rank, range(counts[rank])), *[empty_of(job)] * missing]


def _uneven(rank: int, world_size: int) -> dict[Any, Run]:
    results: dict[Any, Run] = {}
    for name, counts, num_micro_batches in CASES:
        job = JOBS[name]
        if len(counts) != world_size:
            continue
        if (name, counts) not in results:
            model = _build(name, rank, world_size)
            outputs = plain_steps(model, _padded(job, rank, counts))
            results[name, counts] = result_of(model, []), outputs
        model = _build(name, rank, world_size)
        reduction = "mean" if name == "mean" else "sum"
        pipeline = pipeline_of(model, num_micro_batches=num_micro_batches, loss_reduction=reduction)
        outputs = run_to_the_end(pipeline, iter(batches_of(job, rank, range(counts[rank]))))
        for _ in range(2):  # still over, and nobody waits for anybody
            with pytest.raises(StopIteration):
                pipeline.progress(iter([]))
        results[name, counts, num_micro_batches] = result_of(model, []), outputs
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_whose_data_has_ended_goes_on_with_empty_batches(case: Any) -> None:
    name, counts, _ = case
    by_rank = run_once(_uneven, len(counts))
    assert [len(on_rank[case][1]) for on_rank in by_rank] == [max(counts)] * len(counts)
    compare_runs(by_rank, case, (name, counts))


def _epochs(rank: int, world_size: int, name: str) -> dict[str, Run]:
    """Training with 3 and 1 batches, evaluation with 1 and 2, training with 2 and 2; by turns."""
    job = JOBS[name]
    epochs = [(True, (3, 1, 3, 1)), (False, (1, 2, 1, 2)), (True, (2, 2, 2, 2))]
    results = {}
    for kind in ("plain", "interleaved"):
        model = build(job, rank, world_size)
        pipeline = pipeline_of(model, num_micro_batches=2)
        outputs = []
        for is_training, counts in epochs:
            model.train(is_training)
            if kind == "plain":
                outputs += plain_steps(model, _padded(job, rank, counts))
            else:
                outputs += run_to_the_end(
                    pipeline, iter(batches_of(job, rank, range(counts[rank])))
                )
        results[kind] = result_of(model, []), outputs
    return results


@pytest.mark.parametrize(("name", "world_size"), [("waves", 2), ("stock", 2), ("by_host", 4)])
def test_uneven_epochs_of_training_and_evaluation(name: str, world_size: int) -> None:
    by_rank = run_ranks(_epochs, world_size, name, timeout_s=60)
    assert len(by_rank[0]["plain"][1]) == 3 + 2 + 2
    compare_runs(by_rank, "interleaved", "plain")


def _stop_together(rank: int, world_size: int, name: str) -> dict[str, Run]:
    """Ranks have 5 and 3 batches, then 2 and 3 more."""
    job = JOBS[name]
    first, second = (range(5), range(10, 12)) if rank == 0 else (range(3), range(10, 13))
    model = build(job, rank, world_size)
    pipeline = pipeline_of(model, num_micro_batches=2, execute_all_batches=False)
    outputs = run_to_the_end(pipeline, iter(batches_of(job, rank, first)))
    assert len(outputs) == 1  # two more are in flight where the fourth is missing
    more = iter(batches_of(job, rank, second))
    outputs += run_to_the_end(pipeline, more)
    results = {"interleaved": (result_of(model, []), outputs)}

    trained = [0, 1, 2, 3] if rank == 0 else [0, 1, 2, 10]
    return {**results, "plain": plain_run(job, rank, world_size, trained)}


@pytest.mark.parametrize("name", ["hot_cold", "stock"])
def test_ranks_stop_together_where_not_all_batches_are_executed(name: str) -> None:
    by_rank = run_ranks(_stop_together, 2, name, timeout_s=60)
    assert len(by_rank[0]["interleaved"][1]) == 4
    compare_runs(by_rank, "interleaved", "plain")


class _OneIterator:
    """Batches whose iterator is the same object in each epoch, as of workers that persist."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches, self._rest = batches, iter(batches)

    def __iter__(self) -> Any:
        self._rest = iter(self._batches)
        return self

    def __next__(self) -> Batch:
        return next(self._rest)


def _epochs_of_one_iterator(rank: int, world_size: int) -> tuple[dict[Any, Run], list[int]]:
    """Three epochs of 4 and 2 batches, by ours; of 2 and 2, by TorchRec's pipeline."""
    runs: dict[Any, Run] = {}
    for name, executes_all, is_one in product(("hot_cold", "stock"), (True, False), (True, False)):
        job = JOBS[name]
        model, batches = build(job, rank, world_size), batches_of(job, rank, range(4 - 2 * rank))
        pipeline = pipeline_of(model, num_micro_batches=2, execute_all_batches=executes_all)
        epoch: Any = _OneIterator(batches) if is_one else batches
        by_epoch = [run_to_the_end(pipeline, iter(epoch)) for _ in range(3)]
        outputs = [output for outputs_of_one in by_epoch for output in outputs_of_one]
        runs[name, executes_all, is_one] = result_of(model, []), outputs
    theirs = make_driver(None, build(JOBS["stock"], rank, world_size))
    epoch = _OneIterator(batches[:2])
    return runs, [len(run_to_the_end(theirs, iter(epoch))) for _ in range(3)]


def test_an_iterator_that_begins_again() -> None:
    """TorchRec's pipeline asks it no more."""
    by_rank, by_torchrec = zip(*run_ranks(_epochs_of_one_iterator, 2, timeout_s=120))
    assert by_torchrec == ([2, 0, 0],) * 2
    for case in product(("hot_cold", "stock"), (True, False)):
        compare_runs(by_rank, (*case, True), (*case, False), rtol=0, atol=0)


def _early_new_iterators(
    rank: int, world_size: int, num_first: int, who: tuple[int, ...]
) -> dict[str, Run]:
    """New iterators of some ranks after ``num_first`` steps, 5 and 3 batches, then 2 more."""
    job, first, second = JOBS["stock"], (5, 3), range(10, 12)
    results = {}
    for kind in ("plain", "interleaved"):
        model = build(job, rank, world_size)
        if kind == "plain":
            more = batches_of(job, rank, second) if rank in who else [empty_of(job)] * len(second)
            outputs = plain_steps(model, [*_padded(job, rank, first), *more])
        else:
            pipeline = pipeline_of(model, num_micro_batches=1)
            batches = iter(batches_of(job, rank, range(first[rank])))
            outputs = [pipeline.progress(batches) for _ in range(num_first)]
            more = iter(batches_of(job, rank, second)) if rank in who else batches
            outputs += run_to_the_end(pipeline, more)
        results[kind] = result_of(model, []), outputs
    return results


@pytest.mark.parametrize("who", [(0, 1), (1,)])
@pytest.mark.parametrize("num_first", [4, 5])
def test_new_iterators_before_the_end_is_known(num_first: int, who: tuple[int, ...]) -> None:
    by_rank = run_ranks(_early_new_iterators, 2, num_first, who, timeout_s=60)
    compare_runs(by_rank, "interleaved", "plain")


def _exchanges_per_step(rank: int, world_size: int) -> dict[str, int]:
    counts = {}
    for name, execute_all, is_ours in (
        *(("hot_cold", True, True), ("hot_cold stops", False, True)),
        *(("stock", True, True), ("stock by TorchRec", True, False)),
    ):
        job = JOBS[name.split()[0]]
        model, batches = build(job, rank, world_size), iter(batches_of(job, rank, range(5)))
        pipeline = (
            pipeline_of(model, execute_all_batches=execute_all)
            if is_ours
            else make_driver(None, model)
        )
        pipeline.progress(batches)
        with WireMeter() as meter:
            pipeline.progress(batches)
        counts[name] = meter.count.num_collectives
    return counts


def test_knowing_of_the_end_costs_no_exchange_beside_hot_cold_tables() -> None:
    for counts in run_ranks(_exchanges_per_step, 2, timeout_s=60):
        assert counts["hot_cold stops"] == counts["hot_cold"] + 1
        assert counts["stock"] == counts["stock by TorchRec"]


@pytest.mark.parametrize("reduction", ["mean", "ratio"])
def test_losses_of_batches_and_of_empty_ones_without_hot_cold_tables(reduction: str) -> None:
    """An empty batch after the end of data is known by its place, not by its samples."""
    loss = torch.full((), 6.0, requires_grad=True)
    losses = loss if reduction == "mean" else (loss, torch.full((), 4.0))
    options = PipelineOptions(
        custom_model_fwd=lambda batch: (losses, None), loss_reduction=reduction
    )
    steps = StockSteps(torch.nn.Linear(1, 1), options, torch.device("cpu"), True)
    steps._are_data.extend([True, False])
    assert steps.forward(object())[0].item() == (6 if reduction == "mean" else 1.5)
    steps._are_data.popleft()
    empty = steps.forward(object())[0]
    assert empty.requires_grad
    assert empty.item() == 0
