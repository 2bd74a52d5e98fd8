"""Reports of training steps: every figure against an independent one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import PLAIN, Job, build
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import batches_of, pipeline_of
from torchrec_picasso import Refresh, StepReport, StepReports
from torchrec_picasso.app.runs.wire_meter import WireMeter
from torchrec_picasso.exchange.waiting import is_watched

JOB = Job(placement={"a": 20, "b": 4, "c": "bags"}, batch_sizes=(16, 9), num_steps=9)
BY_HOST = replace(JOB, placement={**JOB.placement, "c": "table_wise"}, by_host=("*",))
"""On 2 x 2 ranks."""
NOT_CHECKED = (4, 5, 6)
"""Steps in which no comparison of the cut, and no change of DDP's buckets, sends anything; of 9."""
SETTINGS = ((1, False), (2, True), (4, True))


def _hot(table: str) -> set[int]:
    rows = {each.name: each.rows for each in PLAIN}[table]
    return set(sorted(range(rows), key=lambda row: (row % 3, row))[: int(JOB.placement[table])])


def _hot_and_cold(batch: Batch) -> tuple[int, int]:
    """Numbers of hot and cold rows among a batch's distinct rows."""
    features = batch.sparse_features.to_dict()
    used = {
        "a": set(features["f0"].values().tolist()),
        "b": set(features["f1"].values().tolist()) | set(features["f2"].values().tolist()),
    }
    hot = sum(len(rows & _hot(table)) for table, rows in used.items())
    return hot, sum(map(len, used.values())) - hot


def _lookups_by_home(batch: Batch, job: Job, world_size: int) -> list[int]:
    """Lookups of rows that are not hot by home rank, in equal blocks, and those of bags that
    travel."""
    features, counts_W = batch.sparse_features.to_dict(), [0] * world_size
    for table in PLAIN[:2]:
        for row in torch.cat([features[name].values() for name in table.features]).tolist():
            counts_W[row * world_size // table.rows] += row not in _hot(table.name)
    bags = features["f3"].values().numel() if job.placement["c"] == "bags" else 0
    return [*counts_W, bags]


def _watched(
    rank: int, world_size: int, setting: tuple[int, bool], job: Job = JOB
) -> dict[str, Any]:
    model, reports = build(job, rank, world_size), StepReports()
    k, lookahead = setting
    pipeline = pipeline_of(
        model, num_micro_batches=k, lookahead=lookahead, refresh=None, on_step=reports
    )
    batches = batches_of(job, rank, range(job.num_steps))
    left, metered = iter(batches), []
    for _ in batches:
        with WireMeter() as meter:
            pipeline.progress(left)
        metered.append(meter.count.sent_bytes)
    return {
        "frame": reports.to_frame(),
        "by_rank": reports.by_rank(),
        "metered": metered,
        "hot_and_cold": [_hot_and_cold(batch) for batch in batches],
        "lookups": [_lookups_by_home(batch, job, world_size) for batch in batches],
    }


def _interrupted(rank: int, world_size: int) -> dict[str, Any]:
    """Steps that are not trained are not reported; a callback that raises loses no step."""
    model, seen = build(JOB, rank, world_size), []

    def on_step(report: StepReport) -> None:
        seen.append(report)
        if len(seen) == 3:
            raise ValueError("that will do")

    often = Refresh(every_steps=2, half_life_steps=2, deviations=0.0)
    pipeline = pipeline_of(model, num_micro_batches=2, refresh=often, on_step=on_step)
    left, said = iter(batches_of(JOB, rank, range(JOB.num_steps))), ""
    for step in range(JOB.num_steps):
        model.train(step != 1)
        try:
            pipeline.progress(left)
        except ValueError as error:
            said = f"{step}: {error}"
    reports = StepReports()
    reports.reports = seen
    return {"said": said, "frame": reports.to_frame(), "watched": is_watched()}


def _stock(rank: int, world_size: int) -> list[StepReport]:
    """No table is hot/cold, and the last step is one of a rank without data."""
    job = Job(placement={"*": "table_wise"}, tables=PLAIN, batch_sizes=(16, 9))
    reports = StepReports()
    pipeline = pipeline_of(build(job, rank, world_size), on_step=reports)
    batches = iter(batches_of(job, rank, range(3 - rank)))
    for _ in range(3):
        pipeline.progress(batches)
    return reports.reports


def _run(rank: int, world_size: int) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {each: _watched(rank, world_size, each) for each in SETTINGS}
    found["interrupted"] = _interrupted(rank, world_size)
    found["stock"] = {"reports": _stock(rank, world_size)}
    return found


def _run_by_host(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {"by host": _watched(rank, world_size, (2, True), BY_HOST)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_figures_are_right(setting: tuple[int, bool]) -> None:
    ranks = run_once(_run, 2)
    for rank, found in enumerate(ranks):
        frame = found[setting]["frame"]
        assert frame["step"].tolist() == list(range(JOB.num_steps))
        assert frame["num_samples"].tolist() == [JOB.batch_size(rank)] * JOB.num_steps
        coverage = [hot / (hot + cold) for hot, cold in found[setting]["hot_and_cold"]]
        assert frame["coverage"].tolist() == pytest.approx(coverage)
        metered = [found[setting]["metered"][step] for step in NOT_CHECKED]
        assert frame["sent_bytes"][list(NOT_CHECKED)].tolist() == metered
        assert min(metered) > 0
        # what the other rank sends
        metered = [ranks[1 - rank][setting]["metered"][step] for step in NOT_CHECKED]
        assert frame["received_bytes"][list(NOT_CHECKED)].tolist() == metered
        assert ((frame["exposed_s"] > 0) & (frame["exposed_s"] < frame["seconds"])).all()
        assert (frame["exposed_share"] * frame["seconds"]).to_numpy() == pytest.approx(
            frame["exposed_s"].to_numpy()
        )
        assert (frame["samples_per_s"] * frame["seconds"]).tolist() == pytest.approx(
            frame["num_samples"].tolist()
        )
        assert frame["peak_bytes"].is_monotonic_increasing
        assert frame["peak_bytes"].min() > 1 << 26  # torch alone takes as much
        assert frame["num_moved"].sum() == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_home_ranks_serve_all_rows_that_are_asked_for(setting: tuple[int, bool]) -> None:
    ranks = [found[setting] for found in run_once(_run, 2)]
    asked = [[cold for _, cold in found["hot_and_cold"]] for found in ranks]
    served = [found["frame"]["served_rows"].tolist() for found in ranks]
    assert list(map(sum, zip(*served))) == list(map(sum, zip(*asked)))
    assert all(min(rows) > 0 for rows in served)
    for found in ranks:
        means = found["by_rank"]["served_rows"].tolist()
        assert means == pytest.approx([sum(rows) / len(rows) for rows in served])
        peaks = [other["frame"]["peak_bytes"].iloc[-1] for other in ranks]
        assert found["by_rank"]["peak_bytes"].tolist() == peaks


def test_steps_without_hot_cold_tables_are_reported() -> None:
    samples = ([16, 16, 16], [9, 9, 0])
    for found, expected in zip(run_once(_run, 2), samples, strict=True):
        reports = found["stock"]["reports"]
        assert [report.num_samples for report in reports] == expected
        assert {report.coverage for report in reports} == {None}
        assert min(report.sent_bytes for report in reports) > 0


@pytest.mark.parametrize("setting", [*SETTINGS, "by host"])
def test_lookups_are_counted_where_they_are_served(setting: Any) -> None:
    ranks = run_once(_run, 2) if setting in SETTINGS else run_once(_run_by_host, 4)
    found = [each[setting] for each in ranks]
    *rows_W, bags = torch.tensor([each["lookups"] for each in found]).double().sum(0).mean(0)
    for each in found:
        served_W = each["by_rank"]["served_lookups"].tolist()
        # the table whose bags travel is whole on one rank
        others = [served - float(rows) for served, rows in zip(served_W, rows_W)]
        assert sorted(others) == pytest.approx([0.0] * (len(ranks) - 1) + [float(bags)])


def test_only_trained_steps_are_reported() -> None:
    for found in run_once(_run, 2):
        each = found["interrupted"]
        assert each["said"] == "3: that will do"  # the third that was trained
        assert each["frame"]["step"].tolist() == list(range(JOB.num_steps - 1))
        assert each["frame"]["num_moved"].sum() > 0
        # told once for each look: after every second step
        assert (each["frame"]["num_moved"][::2] == 0).all()
        assert not each["watched"]
