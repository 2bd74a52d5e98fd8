"""Random plans, batches and pipeline settings on 1 to 3 ranks train as stock TorchRec does.

A case is drawn from its seed: tables of 1 to 500 rows, each placed as rows with a random number of
hot rows, pooled by its owner, or stock; equal or lopsided home blocks; ranks without samples. The
stock side is TorchRec's own sharder, table-wise, by the plain loop on the same first weights and
batches. Bad input is tested in ``tests/sharding/test_bad_input.py``.
"""

import dataclasses
import random
from typing import Any

import pytest

from tests.sharding.jobs import Job, Table, build, result_of
from tests.train_pipeline.runs import (
    Run,
    batches_of,
    compare_runs,
    pipeline_of,
    plain_steps,
    run_to_the_end,
)
from torchrec_picasso import Refresh
from torchrec_picasso.app.launch.run_ranks import run_ranks

NUM_CASES, NUM_STEPS = 8, 4
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.1, "eps": 1e-2},
    "rowwise_adagrad": {"lr": 0.1, "eps": 1e-2},
}
"""A small epsilon would let rounding of a gradient near zero decide its update."""

Case = tuple[Job, dict[str, Any]]
"""A job, and the settings of its pipeline; empty for automatic ones."""


def draw_case(seed: str) -> Case:
    draw = random.Random(seed)
    weighted = draw.random() < 0.3
    tables, placement = [], {}
    for number in range(draw.randint(1, 4)):
        name, rows = f"t{number}", draw.choice((1, 2, 3, 7, 60, 500))
        features = tuple(f"f{number}{place}" for place in range(draw.choice((1, 1, 2))))
        is_mean = not weighted and draw.random() < 0.4  # stock divides a weighted mean by the count
        tables.append(Table(name, draw.choice((4, 8, 16)), rows, features, mean=is_mean))
        num_hot = draw.choice((0, rows, draw.randint(0, rows)))
        placement[name] = draw.choice((num_hot, num_hot, "bags", "table_wise"))
    if set(placement.values()) == {"table_wise"}:
        placement["t0"] = 1
    optimizer = draw.choice(sorted(OPTIMIZERS))
    job = Job(
        placement=placement,
        tables=tuple(tables),
        optimizer=optimizer,
        optimizer_kwargs=OPTIMIZERS[optimizer],
        lopsided=draw.random() < 0.5,
        waves={name: draw.choice((0, 0, 1)) for name in placement},
        num_steps=NUM_STEPS,
        batch_sizes=tuple(draw.choice((0, 1, 2, 3, 7, 16)) for _ in range(3)),
        weighted=weighted,
        seed=draw.randint(0, 1000),
    )
    settings: dict[str, Any] = {}
    if draw.random() < 0.7:
        settings = {
            "num_micro_batches": draw.choice((1, 2, 3, 4, 9)),
            "lookahead": draw.random() < 0.5,
        }
    if draw.random() < 0.4:
        settings["refresh"] = Refresh(every_steps=2, check_steps=1, deviations=0.0)
    return job, settings


def train_both(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Run, Run]]:
    """Each case by the pipeline and by stock TorchRec; for the launcher."""
    found = []
    for job, settings in cases:
        batches = batches_of(job, rank, range(NUM_STEPS))
        model = build(job, rank, world_size)
        outputs = run_to_the_end(pipeline_of(model, **settings), iter(batches))
        stock = dataclasses.replace(job, placement={"*": "table_wise"})
        stock_model = build(stock, rank, world_size)
        stock_outputs = plain_steps(stock_model, batches)
        found.append(((result_of(model, []), outputs), (result_of(stock_model, []), stock_outputs)))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trains_as_stock(world_size: int) -> None:
    cases = [draw_case(f"{world_size}/{number}") for number in range(NUM_CASES)]
    by_rank = run_ranks(train_both, world_size, cases, timeout_s=200)
    for number, case in enumerate(cases):
        try:
            compare_runs([of_rank[number] for of_rank in by_rank], 0, 1)
        except AssertionError as error:
            raise AssertionError(f"case {number}: {case}") from error


def test_cases_have_every_kind_of_plan() -> None:
    cases = [draw_case(f"{size}/{number}") for size in (1, 2, 3) for number in range(NUM_CASES)]
    jobs = [job for job, _ in cases]
    places = [
        (place, table.rows)
        for job in jobs
        for table in job.tables
        for place in [job.placement[table.name]]
    ]
    assert {place for place, _ in places if isinstance(place, str)} == {"bags", "table_wise"}
    assert {0, 1} <= {place / rows for place, rows in places if isinstance(place, int)}
    assert {job.optimizer for job in jobs} == set(OPTIMIZERS)
    assert {job.lopsided for job in jobs} == {job.weighted for job in jobs} == {True, False}
    assert any(0 in job.batch_sizes for job in jobs)
    assert any("refresh" in settings for _, settings in cases)
