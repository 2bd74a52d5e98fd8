"""Whoever writes tables between steps finds the write in homes and replicas, as in stock TorchRec.

One training meets every way to write, a few steps apart: on all ranks or on one, through what was
taken just now or kept from the start. Outputs of every step, weights and optimizer state at the end
must be stock's. On three ranks one is home to no table of bags, so nothing shows on it.
Replicas that differ from their homes all the same are found, and named on all ranks.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import PLAIN, Job, build, result_of, storages_of
from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import (
    Driver,
    Run,
    batches_of,
    compare_runs,
    make_driver,
    pipeline_of,
    plain_steps,
    run_to_the_end,
)
from torchrec_picasso import ConfigError, InterleavedTrainPipeline, PicassoError
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.storage.row_tables import HomesAndReplicas

BETWEEN = 2
"""Steps from one write to the next: the first has rows in flight, the second fetched some early."""
ROWS, BAGS = Job(placement={"*": 4}, waves={"b": 1}), Job(placement={"*": "bags"}, tables=PLAIN[:2])
BY_HOST = dataclasses.replace(ROWS, tables=PLAIN[:2], by_host=("*",))
CASES = {
    "rows": (2, ROWS, "row_wise"),
    "by host": (4, BY_HOST, "row_wise"),
    "bags": (3, BAGS, "table_wise"),
}
DRIVERS: tuple[Driver, ...] = (None, (1, True), (2, True))


@dataclass(frozen=True)
class Kept:
    """A model, and what somebody took of it at the start."""

    model: Any
    folder: Path
    parameters: Mapping[str, Tensor]
    data: Mapping[str, Tensor]
    state: Mapping[str, Any]
    first_state: Mapping[str, Any]
    first_optimizer_state: Mapping[str, Any]

    @staticmethod
    def from_model(model: Any, folder: Path) -> Kept:
        parameters, state = dict(_tables(model)), model.state_dict()
        dcp.save(state, checkpoint_id=folder)
        return Kept(
            model=model,
            folder=folder,
            parameters=parameters,
            data={name: parameter.data for name, parameter in parameters.items()},
            state=state,
            first_state=copy.deepcopy(state),
            first_optimizer_state=copy.deepcopy(model.fused_optimizer.state_dict()),
        )


def _tables(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if name.startswith("ebc."):
            yield name, parameter


def _shards(state: Mapping[str, Any]) -> list[Tensor]:
    tables = [value for value in state.values() if isinstance(value, ShardedTensor)]
    return [shard.tensor for value in tables for shard in value.local_shards()]


def _optimizer_shards(model: Any) -> list[Tensor]:
    states = model.fused_optimizer.state_dict()["state"].values()
    return [shard for state in states for shard in _shards(state)]


def _reset(kept: Kept) -> None:
    torch.manual_seed(7)
    kept.model.module.ebc.reset_parameters()


Act = Callable[[Kept], Any]


def _each(tensors: Callable[[Kept], Iterable[Tensor]], write: Callable[[Tensor], Any]) -> Act:
    """Writes each of some tensors."""
    return lambda kept: [write(tensor) for tensor in tensors(kept)]


def _parameters(kept: Kept) -> list[Tensor]:
    return [parameter for _, parameter in _tables(kept.model)]


# what rows hold counts: an average of weights, kept from the start, sees them up to date
_HALVE_SOME_ROWS = _each(lambda kept: kept.parameters.values(), lambda rows: rows[::2].mul_(0.5))

WAYS: Mapping[str, Act] = {
    "fill_": _each(_parameters, lambda rows: rows.fill_(0.25)),
    "some rows of kept parameters": _HALVE_SOME_ROWS,
    "reset_parameters()": _reset,
    "optimizer state": _each(
        lambda kept: _optimizer_shards(kept.model), lambda state: state.add_(0.5)
    ),
    "into a kept state dict": lambda kept: [
        shard.detach().copy_(first)
        for shard, first in zip(_shards(kept.state), _shards(kept.first_state))
    ],
    ".data": _each(_parameters, lambda rows: rows.data.add_(0.125)),
    ".data kept": _each(lambda kept: kept.data.values(), lambda rows: rows[1:].neg_()),
    ".data of a state dict": _each(
        lambda kept: _shards(kept.state), lambda rows: rows.data.mul_(2.0)
    ),
    "load_state_dict": lambda kept: kept.model.load_state_dict(kept.first_state),
    "state of the fused optimizer": lambda kept: kept.model.fused_optimizer.load_state_dict(
        kept.first_optimizer_state
    ),
    "rank 1 alone": _HALVE_SOME_ROWS,
    "dcp.load": lambda kept: dcp.load(kept.state, checkpoint_id=kept.folder),
    "rank 0 alone, after state_dict()": _each(
        lambda kept: _shards(kept.model.state_dict()), lambda rows: rows[:3].fill_(0.0625)
    ),
}
"""What is done before a step, on all ranks unless it names one."""
ALONE = {"rank 1 alone": 1, "rank 0 alone, after state_dict()": 0}
NUM_STEPS = BETWEEN * (len(WAYS) + 1)


def _train(
    job: Job, driver: Driver, rank: int, world_size: int, folder: Path, skipped: str = ""
) -> Run:
    model = build(job, rank, world_size)
    kept, pipeline = Kept.from_model(model, folder), make_driver(driver, model)
    ways = {BETWEEN * number: name for number, name in enumerate(WAYS, start=1)}
    batches, outputs = iter(batches_of(job, rank, range(NUM_STEPS))), []
    for step in range(NUM_STEPS):
        way = ways.get(step, skipped)
        if way != skipped and ALONE.get(way, rank) == rank:
            with torch.no_grad():
                WAYS[way](kept)
        outputs.append(pipeline.progress(batches))
    return result_of(model, []), outputs


def _beside_stock(rank: int, world_size: int, job: Job, stock: str, folder: Path) -> dict[Any, Run]:
    placed = dataclasses.replace(job, placement={"*": stock})
    found: dict[Any, Run] = {"stock": _train(placed, None, rank, world_size, folder / "stock")}
    for driver in DRIVERS:
        found[driver] = _train(job, driver, rank, world_size, folder / str(driver))
    for way in ALONE:
        found[way] = _train(placed, None, rank, world_size, folder / way[:6], way)
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_every_write_is_found(tmp_path: Path, case: str) -> None:
    world_size, job, stock = CASES[case]
    by_rank = run_ranks(_beside_stock, world_size, job, stock, tmp_path, timeout_s=200)
    for driver in DRIVERS:
        compare_runs(by_rank, driver, "stock")
    for way in ALONE:
        with pytest.raises(AssertionError):  # the smallest writes are seen, even if they are last
            compare_runs(by_rank, way, "stock")


def _halve(model: Any) -> None:
    with torch.no_grad():
        for _, parameter in _tables(model):
            parameter.mul_(0.5)


COLD = Job(placement={"*": 0, "c": "bags"})
CASES_OF_READS = [
    (f"{kind}, ranks {ranks}, {fails=}", job, ranks, fails)
    for kind, job in {"hot": ROWS, "cold": COLD}.items()
    for ranks in ((0, 1), (1,))
    for fails in (False, True)
]


class _Reader(Iterator[Batch]):
    """Batches; one of them is read after some acts, each done once."""

    def __init__(self, batches: list[Batch], at: int, acts: list[Callable[[], Any]]) -> None:
        self._batches, self._before, self._acts = iter(batches), at, acts

    def __next__(self) -> Batch:
        self._before -= 1
        while self._before < 0 and self._acts:
            self._acts.pop(0)()
        return next(self._batches)


def _fail() -> None:
    raise OSError("a file is gone")


def _write_in_iterator(rank: int, world_size: int) -> dict[Any, tuple[Run, Run]]:
    """Batch 4 is read in the step of batch 2, which finds the write, or in a second call of it."""
    found, summed, in_step = {}, 4, 2
    for name, job, ranks, fails in CASES_OF_READS:
        mine, plain = (build(job, rank, world_size) for _ in range(2))
        pipeline, batches = pipeline_of(mine, num_micro_batches=2), batches_of(job, rank, range(7))
        acts = [partial(_halve, mine)] if rank in ranks else []
        fails = fails and bool(acts)
        reader = _Reader(batches, summed, [_fail] * fails + acts)
        outputs = [pipeline.progress(reader) for _ in range(in_step)]
        if fails:
            with pytest.raises(OSError, match="a file is gone"):
                pipeline.progress(reader)
        outputs += run_to_the_end(pipeline, reader)
        at_step = {in_step: partial(_halve, plain)} if rank in ranks else {}
        expected = plain_steps(
            plain, batches, before_step=lambda step, act=at_step: act.get(step, int)()
        )
        found[name] = (result_of(mine, []), outputs), (result_of(plain, []), expected)
    return found


def test_a_write_by_the_data_iterator_is_found() -> None:
    by_rank = run_ranks(_write_in_iterator, 2, timeout_s=100)
    for name in by_rank[0]:
        compare_runs([on_rank[name] for on_rank in by_rank], 0, 1)


def _write_in_forward(rank: int, world_size: int) -> list[str]:
    messages = []
    for driver in (None, (1, True)):
        model = build(ROWS, rank, world_size)
        pipeline, forward = make_driver(driver, model), model.module.over.forward

        def writing(columns: Tensor, model: Any = model, forward: Any = forward) -> Tensor:
            _halve(model)
            return forward(columns)

        batches = iter(batches_of(ROWS, rank, range(4)))
        pipeline.progress(batches)
        model.module.over.forward = writing
        messages.append(refusal(PicassoError, run_to_the_end, pipeline, batches))
    return messages


def test_a_write_between_a_forward_and_its_update_is_refused() -> None:
    for on_rank in run_ranks(_write_in_forward, 2, timeout_s=60):
        for message in on_rank:
            assert "'c' was written between a forward and the update of its backward" in message


def _write_and_look(rank: int, world_size: int) -> tuple[Run, Run]:
    """A forward by hand finds the write first, while rows of the pipeline are in flight."""
    mine, plain = (build(ROWS, rank, world_size) for _ in range(2))
    pipeline, batches = pipeline_of(mine, num_micro_batches=2), batches_of(ROWS, rank, range(6))
    reader = iter(batches)
    outputs = [pipeline.progress(reader) for _ in range(2)]
    pipeline.detach()
    _halve(mine)
    with torch.no_grad():
        mine.eval()(batches[0])
    mine.train()
    outputs += run_to_the_end(pipeline, reader)
    expected = plain_steps(plain, batches, before_step=lambda s: _halve(plain) if s == 2 else None)
    return (result_of(mine, []), outputs), (result_of(plain, []), expected)


def test_a_write_that_a_forward_by_hand_found_first_is_found() -> None:
    compare_runs(run_ranks(_write_and_look, 2, timeout_s=60), 0, 1)


def _write_before_lookup(rank: int, world_size: int) -> str:
    model, calls = build(Job(placement={"*": 0}), rank, world_size), []

    def forward(batch: Batch) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            _halve(model)
        return model(batch)

    pipeline = pipeline_of(model, num_micro_batches=1, custom_model_fwd=forward)
    return refusal(PicassoError, run_to_the_end, pipeline, iter(batches_of(ROWS, rank, range(5))))


def test_a_write_in_a_forward_before_the_lookup_is_refused() -> None:
    """The rows were fetched before; stock TorchRec looks up what was written."""
    for message in run_ranks(_write_before_lookup, 2, timeout_s=60):
        assert "was written in a forward, after the rows that it looks up were fetched" in message


def _set_rate(model: Any) -> None:
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.5


def _rate_in_iterator(rank: int, world_size: int) -> list[Run]:
    runs = []
    for driver in DRIVERS:
        model = build(ROWS, rank, world_size)
        reader = _Reader(batches_of(ROWS, rank, range(7)), 4, [partial(_set_rate, model)])
        outputs = run_to_the_end(make_driver(driver, model), reader)
        runs.append((result_of(model, []), outputs))
    return runs


def test_a_learning_rate_of_the_data_iterator_comes_as_under_torchrecs_pipeline() -> None:
    """In the step after that in which the batch is read: gradients are cleared before."""
    by_rank = run_ranks(_rate_in_iterator, 2, timeout_s=100)
    for mine in range(1, len(DRIVERS)):
        compare_runs(by_rank, mine, 0)


JOB = Job(placement={"*": 6, "c": 0}, tables=PLAIN, num_steps=7)
"""Rank 0 is home to the first half of each table."""
CHANGED = {"sound": None, "weight": (1, "weights", 8), "state": (0, "sum", 3), "nan": None}
"""Rank, tensor and slot in the pack of a and b of what is changed behind torch's back."""


def _run(rank: int, world_size: int) -> dict[str, str]:
    return {name: _said(name, rank, world_size) for name in CHANGED}


def _said(name: str, rank: int, world_size: int) -> str:
    model = build(JOB, rank, world_size)
    pipeline = pipeline_of(model, num_micro_batches=2, refresh=None, verify_every=3)
    batches, changed = iter(batches_of(JOB, rank, range(JOB.num_steps))), CHANGED[name]
    try:
        for step in range(JOB.num_steps):
            pipeline.progress(batches)
            if step == 3 and changed is not None and changed[0] == rank:
                _, tensor, slot = changed
                _rows_of(model, tensor).replicas.data[slot] += 1.0
            if step == 3 and name == "nan":
                _rows_of(model, "weights").homes[0] = torch.nan  # row 0 or its half's first
    except PicassoError as error:
        return f"step {step}: {error}"
    return "sound"


def _rows_of(model: Any, tensor: str) -> HomesAndReplicas:
    """Of the first pack with hot rows."""
    tables = next(each.tables for each in storages_of(model) if each.num_hot_rows)
    return tables.weights if tensor == "weights" else tables.row_states[tensor]


def test_what_differs_is_named_on_all_ranks() -> None:
    said = run_once(_run, 2)
    assert said[0] == said[1]
    assert said[0]["sound"] == "sound"
    assert said[0]["nan"] == "sound"  # the same bits everywhere
    # slots 0 to 5 are of a, 6 to 11 of b, whose hot rows are 0, 1, 3, 4, 6, 9
    assert said[0]["weight"].startswith(
        "step 5: table 'b', row 3: the replica on rank 1 is not what its home on rank "
    )
    assert "1 on rank 1 differ" in said[0]["weight"]


def test_a_home_that_brought_its_own_replica_is_right() -> None:
    said = run_once(_run, 2)
    # row 9 of a is at home on rank 0, whose replica goes home: then rank 1's is the other one
    assert said[0]["state"].startswith("step 5: table 'a', row 9: the replica on rank 1 is not")


def test_numbers_below_one_are_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="verify_every is 0, expected at least 1"):
        InterleavedTrainPipeline(model, optimizer, torch.device("cpu"), verify_every=0)
