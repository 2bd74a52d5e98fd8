"""Interleaved training against the plain loop: outputs, weights, state; K 1, 2, 4; 2 and 3 ranks.

Of what ``test_against_stock.py`` leaves out: waves, bags depth first, stock tables beside, half
precision on the wire; and of what is the same to the bit. That the plain loop equals stock TorchRec
is ``tests/sharding/test_exactness.py``. Micro-batches sum gradients in another order, hence the
tolerance; looking ahead changes no bit.

Random plans: a case is drawn from its seed: tables of 1 to 500 rows, each placed as rows with a
random number of hot rows, pooled by its owner, or stock; equal or lopsided home blocks; ranks
without samples; 1 to 3 ranks. The stock side is TorchRec's own sharder, table-wise, by the plain
loop on the same first weights and batches.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.sharding.jobs import ATOL, ODD, PLAIN, RTOL, Job, Table, build, result_of
from tests.support.shared_run import run_once
from tests.train_pipeline import runs
from tests.train_pipeline.runs import SETTINGS_OF, train_job
from torchrec_picasso import Refresh
from torchrec_picasso.app.launch.run_ranks import run_ranks

ODD_ROWS = Job(placement={"*": 2, "one_row": 1}, tables=ODD, num_steps=5)
JOBS = {
    "rows": ODD_ROWS,
    "mixed": Job(placement={"*": 2, "b": "table_wise"}, tables=PLAIN, num_steps=5),
    "waves": dataclasses.replace(ODD_ROWS, waves={"a": 1, "b": 2, "two_rows": 2, "d": 1}),
    "waves_weighted_uneven": Job(
        placement={"*": 2, "one_row": 0},
        tables=tuple(dataclasses.replace(table, mean=False) for table in ODD),
        waves={"b": 1, "d": 3},
        weighted=True,
        batch_sizes=(16, 9, 0),
        num_steps=5,
    ),
    "bags": Job(  # two micro-batches run depth first, in three waves
        placement={"*": "bags"}, tables=ODD, weighted=True, batch_sizes=(16, 9, 0), num_steps=5
    ),
    "waves_half_wire": Job(
        placement={"*": 2}, tables=ODD[:2], waves={"b": 1}, wire="fp16", num_steps=5
    ),
}
JOBS_OF = {2: tuple(JOBS), 3: ("rows", "waves_weighted_uneven")}
"""By number of ranks."""
TOLERANCES = {"waves_half_wire": (5e-3, 1e-3)}  # a sum may round to the next of 11 bits
CASES = [
    (world_size, name, setting)
    for world_size, names in JOBS_OF.items()
    for name in names
    for setting in SETTINGS_OF[world_size]
]


def _run(rank: int, world_size: int) -> dict[Any, runs.Run]:
    found: dict[Any, runs.Run] = {}
    for name in JOBS_OF[world_size]:
        found[name, "plain"] = runs.plain_run(JOBS[name], rank, world_size)
        for setting in SETTINGS_OF[world_size]:
            found[name, setting] = train_job(JOBS[name], setting, rank, world_size)
    for name, driver in (("again", (4, True)), ("SparseDist", None)):
        found[name] = train_job(ODD_ROWS, driver, rank, world_size)
    return found


@pytest.mark.parametrize(("world_size", "name", "setting"), CASES)
def test_trains_as_the_plain_loop(world_size: int, name: str, setting: tuple[int, bool]) -> None:
    rtol, atol = TOLERANCES.get(name, (RTOL, ATOL))
    by_rank = run_once(_run, world_size)
    runs.compare_runs(by_rank, (name, setting), (name, "plain"), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("world_size", "name", "num_micro_batches"),
    [(size, name, k) for size, name, (k, ahead) in CASES if size == 2 and not ahead],
)
def test_looking_ahead_changes_nothing(world_size: int, name: str, num_micro_batches: int) -> None:
    keys = ((name, (num_micro_batches, ahead)) for ahead in (True, False))
    runs.compare_runs(run_once(_run, world_size), *keys, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_settings_give_the_same_bits(world_size: int) -> None:
    runs.compare_runs(run_once(_run, world_size), "again", ("rows", (4, True)), rtol=0, atol=0)


def test_torchrecs_pipeline_gives_the_bits_of_the_plain_loop() -> None:
    runs.compare_runs(run_once(_run, 2), "SparseDist", ("rows", "plain"), rtol=0, atol=0)


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


def train_both(rank: int, world_size: int, cases: list[Case]) -> list[tuple[runs.Run, runs.Run]]:
    """Each case by the pipeline and by stock TorchRec; for the launcher."""
    found = []
    for job, settings in cases:
        batches = runs.batches_of(job, rank, range(NUM_STEPS))
        model = build(job, rank, world_size)
        outputs = runs.run_to_the_end(runs.pipeline_of(model, **settings), iter(batches))
        stock = dataclasses.replace(job, placement={"*": "table_wise"})
        expected = runs.plain_run(stock, rank, world_size)
        found.append(((result_of(model, []), outputs), expected))
    return found


def check_cases(seeds: list[str], world_size: int, change: Callable[[Job], Job]) -> None:
    """Compares drawn cases with stock; says which one differs."""
    cases = [(change(job), settings) for job, settings in map(draw_case, seeds)]
    by_rank = run_ranks(train_both, world_size, cases, timeout_s=200)
    for number, case in enumerate(cases):
        try:
            runs.compare_runs([on_rank[number] for on_rank in by_rank], 0, 1)
        except AssertionError as error:
            raise AssertionError(f"seed {seeds[number]}: {case}") from error


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trains_as_stock(world_size: int) -> None:
    seeds = [f"{world_size}/{number}" for number in range(NUM_CASES)]
    check_cases(seeds, world_size, lambda job: job)


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
