"""Rows by host beside what else a run does: sequences, several modules, refreshes, prepared ids,
writes, bad ids, data that ends, ranks that fail; two hosts of two ranks, pretended.

A refresh counts ranks that ask, not hosts, so it chooses the rows that it chooses without hosts.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import (
    ODD,
    Job,
    Result,
    assert_same_results,
    build,
    checkpoint_of,
    result_of,
    train,
    whole,
)
from tests.sharding.sequence_jobs import SequenceJob, build_sequences, train_sequences
from tests.support.hosts import pretend_hosts
from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.train_pipeline import runs, test_collectives, test_peers, test_preparation, test_refresh
from torchrec_picasso import InputError, PeerError
from torchrec_picasso.app.launch.run_ranks import run_ranks

WORLD_SIZE, NUM_PLACES = 4, 2
BY_HOST = ("*",)
ROWS = Job(placement={"*": 2, "one_row": 1}, tables=ODD, by_host=BY_HOST, batch_sizes=(16, 9, 0, 5))
SETTINGS = ((1, True), (4, True))

SEQUENCES = {
    "three modules": SequenceJob(placement={"*": 3}, by_host=BY_HOST, batch_sizes=(6, 3, 1, 5)),
    "beside modules without hosts": SequenceJob(
        placement={"*": 3, "user": "bags"}, by_host=("item", "shop"), batch_sizes=(6, 3, 4, 5)
    ),
}


def _train_sequences(rank: int, world_size: int) -> dict[Any, Any]:
    pretend_hosts(rank, NUM_PLACES)
    found = {}
    for name, job in SEQUENCES.items():
        stock = dataclasses.replace(job, placement={"*": "table_wise"})
        model = build_sequences(stock, world_size)
        found[name, "stock"] = train_sequences(model, stock, rank, runs.plain_steps)
        for setting in (None, *SETTINGS):

            def drive(model: Any, batches: list[Batch], setting: Any = setting) -> Any:
                return runs.run_to_the_end(runs.make_driver(setting, model), iter(batches))

            model = build_sequences(job, world_size)
            found[name, setting] = train_sequences(model, job, rank, drive)
    return found


@pytest.mark.parametrize("setting", [None, *SETTINGS], ids=str)
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_and_modules_train_as_stock(name: str, setting: Any) -> None:
    by_rank = run_once(_train_sequences, WORLD_SIZE)
    mine, its = ([of_rank[name, kind] for of_rank in by_rank] for kind in (setting, "stock"))
    test_refresh.assert_same_results(mine, its)


REFRESHED = Job(placement={"*": 6}, batch_sizes=(16, 9, 3, 5))


def _refresh(rank: int, world_size: int) -> dict[Any, Any]:
    pretend_hosts(rank, NUM_PLACES)
    found: dict[Any, Any] = {}
    for by_host in ((), BY_HOST):
        job = dataclasses.replace(REFRESHED, by_host=by_host)
        for driver in (None, *SETTINGS):
            found[bool(by_host), driver] = test_refresh._train(job, rank, world_size, driver)
    return found


@pytest.mark.parametrize("driver", [None, *SETTINGS], ids=str)
def test_a_refresh_chooses_what_it_chooses_without_hosts(driver: Any) -> None:
    mine, flat = (
        [of_rank[by_host, driver] for of_rank in run_once(_refresh, WORLD_SIZE)]
        for by_host in (True, False)
    )
    test_refresh.assert_same_results([run.result for run in mine], [run.result for run in flat])
    assert mine[0].num_moved > 4
    for run, other in zip(mine, flat):
        assert run.hot_rows == other.hot_rows
        assert run.num_moved == other.num_moved
        assert run.replicas_are_homes


def _prepare(rank: int, world_size: int) -> dict[Any, Any]:
    pretend_hosts(rank, NUM_PLACES)
    found: dict[Any, Any] = {}
    for setting in SETTINGS:
        for is_prepared in (True, False):
            model = build(ROWS, rank, world_size)
            k, lookahead = setting
            pipeline = runs.pipeline_of(model, num_micro_batches=k, lookahead=lookahead)
            batches = runs.batches_of(ROWS, rank, range(5))
            given = map(pipeline.preparation(), batches) if is_prepared else iter(batches)
            outputs = runs.run_to_the_end(pipeline, given)
            found[setting, is_prepared] = result_of(model, []), outputs
            assert ("prepared" in pipeline.summary()) == is_prepared
            if is_prepared and ROWS.batch_size(rank):
                used, again = test_preparation._counts(pipeline.summary())
                assert used >= len(batches)
                assert not again
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_prepared_ids_train_the_same_bits(setting: tuple[int, bool]) -> None:
    by_rank = run_once(_prepare, WORLD_SIZE)
    runs.compare_runs(by_rank, (setting, True), (setting, False), rtol=0, atol=0)


def _halve(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("ebc."):
                parameter.mul_(0.5)


def _write(rank: int, world_size: int) -> dict[Any, runs.Run]:
    """One rank's rows are halved before step 3, while rows of later batches are on their way."""
    pretend_hosts(rank, NUM_PLACES)
    found: dict[Any, runs.Run] = {}
    batches = runs.batches_of(ROWS, rank, range(7))
    for setting in SETTINGS:
        model = build(ROWS, rank, world_size)
        k, lookahead = setting
        pipeline = runs.pipeline_of(model, num_micro_batches=k, lookahead=lookahead)
        left = iter(batches)
        outputs = [pipeline.progress(left) for _ in range(3)]
        if rank == 1:
            _halve(model)
        outputs += runs.run_to_the_end(pipeline, left)
        found[setting] = result_of(model, []), outputs
    model = build(ROWS, rank, world_size)

    def before_step(step: int) -> None:
        if rank == 1 and step == 3:
            _halve(model)

    outputs = runs.plain_steps(model, batches, before_step=before_step)
    found["plain"] = result_of(model, []), outputs
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_write_between_steps_is_found(setting: tuple[int, bool]) -> None:
    runs.compare_runs(run_once(_write, WORLD_SIZE), setting, "plain")


SMALL = Job(placement={"*": 4}, by_host=BY_HOST)


def _load_and_go_on(
    rank: int, world_size: int, job: Job, load: Path | None, steps: range, save: Path
) -> tuple[Result, Result]:
    """What a checkpoint gives, and what training leaves behind, which is saved."""
    pretend_hosts(rank, NUM_PLACES)
    model = build(job, rank, world_size)
    train(model, job, rank, [99])  # replicas have other rows than the checkpoint
    state = checkpoint_of(model)
    if load is not None:
        dcp.load(state, checkpoint_id=load)
    loaded = result_of(model, [])
    losses = train(model, job, rank, steps)
    dcp.save(checkpoint_of(model), checkpoint_id=save)
    return loaded, result_of(model, losses)


def test_a_checkpoint_goes_to_flat_rows_to_other_hosts_and_back(tmp_path: Path) -> None:
    flat = dataclasses.replace(SMALL, by_host=())
    left: dict[str, list[Result]] = {}
    for name, world_size, job, before, steps in (
        ("first", 4, SMALL, None, range(3)),
        ("by host", 4, SMALL, "first", range(3, 6)),
        ("flat", 4, flat, "first", range(3, 6)),
        ("three hosts", 6, SMALL, "flat", range(6, 7)),
        ("back", 4, SMALL, "three hosts", range(7, 8)),
    ):
        load = None if before is None else tmp_path / before
        found = run_ranks(
            _load_and_go_on, world_size, job, load, steps, tmp_path / name, timeout_s=100
        )
        loaded, left[name] = map(list, zip(*found))
        for kind in ("weights", "states") if before else ():
            expected = whole(left[before], kind)  # type: ignore[index]
            torch.testing.assert_close(whole(loaded, kind), expected, rtol=0, atol=0)
    assert_same_results(left["by host"], left["flat"])


COUNTS = ((5, 3, 0, 2), (0, 0, 0, 3), (4, 4, 4, 4))
"""Batches of each rank."""


def _end(rank: int, world_size: int) -> dict[Any, runs.Run]:
    """Training, then an evaluation of as many batches, then training again."""
    pretend_hosts(rank, NUM_PLACES)
    job = dataclasses.replace(ROWS, batch_sizes=(16, 9, 3, 5))
    found: dict[Any, runs.Run] = {}
    for counts in COUNTS:
        own = runs.batches_of(job, rank, range(counts[rank]))
        padded = [*own, *[runs.empty_of(job)] * (max(counts) - len(own))]
        for setting in ("plain", *SETTINGS):
            model, outputs = build(job, rank, world_size), []
            if isinstance(setting, tuple):
                k, lookahead = setting
                pipeline = runs.pipeline_of(model, num_micro_batches=k, lookahead=lookahead)
            for is_training in (True, False, True):
                model.train(is_training)
                if isinstance(setting, tuple):
                    outputs += runs.run_to_the_end(pipeline, iter(own))
                else:
                    outputs += runs.plain_steps(model, padded)
            found[counts, setting] = result_of(model, []), outputs
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_data_that_ends(counts: tuple[int, ...], setting: tuple[int, bool]) -> None:
    runs.compare_runs(run_once(_end, WORLD_SIZE), (counts, setting), (counts, "plain"))


def _look_away(rank: int, world_size: int, job: Job) -> list[torch.Tensor]:
    """An evaluation by hand; rank 1 does not look at what its first two lookups give."""
    pretend_hosts(rank, NUM_PLACES)
    model, outputs = build(job, rank, world_size).eval(), []
    with torch.no_grad():
        for step, batch in enumerate(runs.batches_of(job, rank, range(4))):
            if rank == 1 and step < 2:
                model.module.ebc(batch.sparse_features)
            else:
                outputs.append(model(batch)[1])
    return outputs


def test_a_rank_that_does_not_look_at_its_rows_passes_on_those_of_others() -> None:
    stock = dataclasses.replace(SMALL, placement={"*": "table_wise"})
    mine, its = (run_ranks(_look_away, WORLD_SIZE, j, timeout_s=60) for j in (SMALL, stock))
    torch.testing.assert_close(mine, its)


def _spoilt(batch: Batch, bad_id: int) -> Batch:
    ids = batch.sparse_features.values().clone()
    ids[0] = bad_id
    features = type(batch.sparse_features)(
        keys=batch.sparse_features.keys(), values=ids, lengths=batch.sparse_features.lengths()
    )
    return dataclasses.replace(batch, sparse_features=features)


def _refuse(rank: int, world_size: int) -> tuple[list[str], dict[str, runs.Run]]:
    """A bad id in the third batch of rank 1, then training again by another pipeline."""
    pretend_hosts(rank, NUM_PLACES)
    told = []
    models = build(ROWS, rank, world_size), build(ROWS, rank, world_size)
    batches = runs.batches_of(ROWS, rank, range(6))
    for setting in SETTINGS:
        bad = [*batches[:2], _spoilt(batches[2], 10**6) if rank == 1 else batches[2], *batches[3:]]
        k, lookahead = setting
        model = build(ROWS, rank, world_size)
        pipeline = runs.pipeline_of(model, num_micro_batches=k, lookahead=lookahead)
        told.append(refusal(InputError, runs.run_to_the_end, pipeline, iter(bad)))
    found = {}
    for name, model, driver in zip(("mine", "plain"), models, (SETTINGS[1], None)):
        if driver is None:
            outputs = runs.plain_steps(model, batches)
        else:
            outputs = runs.run_to_the_end(runs.make_driver(driver, model), iter(batches))
        found[name] = result_of(model, []), outputs
    return told, found


def test_a_bad_id_is_named_on_all_ranks_and_training_goes_on() -> None:
    by_rank = run_ranks(_refuse, WORLD_SIZE, timeout_s=100)
    for rank, (told, _) in enumerate(by_rank):
        own = "feature 'f0' looks up row 1000000 of table "
        # two tables have the feature
        start = own if rank == 1 else "rank 1 holds 2 ids outside their tables"
        assert [text.startswith(start) for text in told] == [True] * len(SETTINGS), told
    runs.compare_runs([found for _, found in by_rank], "mine", "plain")


def _count(rank: int, world_size: int) -> dict[Any, list[float]]:
    """All-to-alls of some steps, by number of tables and driver."""
    pretend_hosts(rank, NUM_PLACES)
    found = {}
    for num_tables in (2, 26):
        job = dataclasses.replace(
            test_collectives._job(num_tables), by_host=BY_HOST, batch_sizes=(12,)
        )
        for driver in test_collectives.PER_STEP:
            kinds = test_collectives._kinds(build(job, rank, world_size), job, rank, driver)
            found[num_tables, driver] = [step["all_to_all"] for step in kinds]
    return found


def test_each_exchange_but_the_agreement_has_two_parts() -> None:
    for of_rank in run_ranks(_count, WORLD_SIZE, timeout_s=200):
        for (_, driver), counts in of_rank.items():
            flat = test_collectives.PER_STEP[driver]["all_to_all"]
            # and the sum of hot rows has two, before and after its all-reduce over hosts
            assert counts == [1 + 2 * (flat - 1) + 2] * len(counts), driver


def _fail(rank: int, world_size: int, *args: Any) -> tuple[str, str, float]:
    pretend_hosts(rank, NUM_PLACES)
    return test_peers.fail_on_one_rank(rank, world_size, *args)


@pytest.mark.parametrize(
    ("where", "at"), [("forward", "step 4, forward 0"), ("data", "step 2, next batch")]
)
def test_a_rank_that_raises_is_heard_by_all(tmp_path: Path, where: str, at: str) -> None:
    job = dataclasses.replace(ROWS, batch_sizes=(16,))
    args = (str(tmp_path), job, where, test_peers.break_it)
    raised = run_ranks(_fail, WORLD_SIZE, *args, timeout_s=60)
    for rank, (kind, text, _) in enumerate(raised):
        if rank == test_peers.FAULTY:
            assert (kind, text) == ("BrokenError", "the user's own words")
        else:
            told = f"rank {test_peers.FAULTY} failed in {at}: BrokenError: the user's own words"
            assert (kind, text) == (PeerError.__name__, told)


def test_a_rank_that_hangs_is_named_within_the_timeout(tmp_path: Path) -> None:
    job = dataclasses.replace(ROWS, batch_sizes=(16,))
    args = (str(tmp_path), job, "forward", test_peers.hang)
    raised = run_ranks(_fail, WORLD_SIZE, *args, timeout_s=60)
    for rank, (kind, text, after_s) in enumerate(raised):
        if rank != test_peers.FAULTY:
            assert kind == PeerError.__name__
            assert text.endswith(f"; rank {test_peers.FAULTY} said nothing: it hangs or was ended")
            assert after_s < 2 * test_peers.GROUP_TIMEOUT_S
