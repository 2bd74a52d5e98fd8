"""The scenarios with targets: what they ask, how they are judged, and that a run goes on."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipelines import suite
from benchmarks.pipelines.__main__ import main
from benchmarks.pipelines.compare import curve_bytes
from benchmarks.pipelines.question import Question
from benchmarks.pipelines.rankings import rankings
from benchmarks.pipelines.report import Report
from benchmarks.pipelines.runner import Block, RankResult
from benchmarks.pipelines.scenarios import SCENARIOS, Scenario
from benchmarks.pipelines.summary import (
    SummaryRow,
    summary_row,
    summary_table,
    without_report,
)
from benchmarks.pipelines.variants import parse_variant

SCENARIO_OF = {scenario.name: scenario for scenario in SCENARIOS}
TINY = ("--data", "zipf", "--batch-size", "32", "--dim", "8", "--max-rows", "300")
FLOORS: dict[str, float | None] = {
    **{"wire_ms": None, "compute_ms": 10.0},
    **{"step_ms": 12.0, "step_over_floor": 1.2},
}


def report(question: Question, step_s: dict[str, float]) -> Report:
    """A report in which steps of every variant last as given, seconds."""
    results = [
        RankResult(
            variant=parse_variant(name),
            blocks=[Block(step_s=[s, s], thread_s=[s / 4, s / 4], cpu_s=s, link_bytes=None)],
            losses=[0.5],
            metered_bytes=10.0,
            collectives=5.0,
            tables={"table_wise": 26},
            hot_rows=0,
            trains_same_model=True,
            num_micro_batches=4 if name.startswith("interleaved") else None,
            lookahead=True if name.startswith("interleaved") else None,
        )
        for name, s in step_s.items()
    ]
    found = rankings([results], question.batch_size, 1)
    return Report(question=question, variants=found, probe_ms={}, left_out={}, floors=FLOORS)


def row(scenario: Scenario, step_s: dict[str, float], **options: Any) -> SummaryRow:
    answer = report(scenario.question("criteo.parquet", options), step_s)
    document = {"environment": {"date_utc": "2026-01-01"}, **dataclasses.asdict(answer)}
    return summary_row(scenario, json.loads(json.dumps(document)))


def test_the_six_targets_are_asked_for_at_their_sizes() -> None:
    asked = {
        scenario.name: (
            scenario.target,
            *(question.rate_mbit, question.towers, question.batch_size, question.data),
        )
        for scenario in SCENARIOS
        for question in [scenario.question("criteo.parquet")]
    }
    assert asked == {
        "1gbit_thin": (4.0, 1000.0, "thin", 4096, "criteo.parquet"),
        "1gbit_dlrm": (3.0, 1000.0, "dlrm", 4096, "criteo.parquet"),
        "100mbit_thin": (6.0, 100.0, "thin", 4096, "criteo.parquet"),
        "1gbit_thin_16384": (4.5, 1000.0, "thin", 16384, "criteo.parquet"),
        "1gbit_uniform": (0.97, 1000.0, "thin", 4096, "uniform"),
        "loopback_thin": (1.0, None, "thin", 4096, "criteo.parquet"),
    }
    for scenario in SCENARIOS:
        question = scenario.question("criteo.parquet")
        assert (question.hosts, question.ranks_per_host, question.dim) == (2, 1, 128)
        optimizer = question.config().optimizer
        assert optimizer.embedding_optimizer == "rowwise_adagrad"
        variants = [parse_variant(name) for name in question.variants]
        assert {"hot_cold", "interleaved"} <= set(question.variants)
        # where a step takes seconds, only the stock plan that was the best with shorter ones
        short = scenario.name not in ("100mbit_thin", "1gbit_thin_16384")
        assert sum(variant.is_stock for variant in variants) == (5 if short else 1)


def test_curves_take_no_longer_on_a_slow_link() -> None:
    assert curve_bytes(None) == curve_bytes(1000.0) == curve_bytes(10_000.0) == 64 << 20
    assert curve_bytes(100.0) == pytest.approx((64 << 20) / 10, abs=1)
    assert curve_bytes(1.0) == 1 << 20


def test_the_best_of_ours_is_judged() -> None:
    steps = {"table_wise": 0.4, "row_wise": 0.5, "hot_cold": 0.2, "interleaved": 0.1}
    found = row(SCENARIO_OF["1gbit_thin"], steps)
    assert (found.best, found.best_stock, found.verdict) == ("interleaved", "table_wise", "met")
    assert found.ratios == pytest.approx({"hot_cold": 2.0, "interleaved": 4.0})
    assert (found.num_micro_batches, found.lookahead) == ("4", "yes")
    assert found.exposed_share == pytest.approx(0.75)
    assert row(SCENARIO_OF["1gbit_thin"], {**steps, "interleaved": 0.101}).verdict == "missed"


def test_on_uniform_ids_none_of_ours_may_lose() -> None:
    uniform = SCENARIO_OF["1gbit_uniform"]
    assert row(uniform, {"table_wise": 0.4, "hot_cold": 0.4, "interleaved": 0.41}).verdict == "met"
    steps = {"table_wise": 0.4, "hot_cold": 0.2, "interleaved": 0.42}
    assert row(uniform, steps).verdict == "missed"


@pytest.mark.parametrize("size", [{"batch_size": 256}, {"dim": 16}, {"hosts": 3}])
def test_a_target_says_nothing_of_other_sizes(size: dict[str, int]) -> None:
    steps = {"table_wise": 0.4, "hot_cold": 0.1}
    assert row(SCENARIO_OF["1gbit_thin"], steps, **size).verdict == "other sizes"
    assert row(SCENARIO_OF["1gbit_thin"], steps, rounds=1).verdict == "met"


def test_the_table_has_a_line_per_scenario_with_its_target() -> None:
    scenario = SCENARIO_OF["1gbit_thin"]
    rows = [row(scenario, {"table_wise": 0.4, "hot_cold": 0.2}), without_report(scenario, "a|b")]
    head, rule, first, second = summary_table(rows).splitlines()
    cells = [line.count("|") for line in (head, rule, first, second)]
    assert cells == [cells[0]] * 4
    assert len({len(line) for line in (head, rule, first, second)}) == 1
    assert ">= 4" in first
    assert "2.00" in first
    assert "missed" in first
    assert "not run: a/b" in second


def test_a_scenario_without_ours_is_not_run() -> None:
    found = row(SCENARIO_OF["1gbit_thin"], {"table_wise": 0.4})
    assert (found.verdict, found.reason) == ("not run", "none of our variants ran")


local_costs_from: list[str | None] = []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Questions that reached the ranks, which answer at once."""
    questions: list[Question] = []
    local_costs_from.clear()

    def answer_at_once(
        question: Question, left_out: dict[str, str], curves: str, local_from: str | None
    ) -> Report:
        questions.append(question)
        local_costs_from.append(local_from)
        Path(curves).write_text("{}")
        if question.towers == "dlrm":
            raise suite.ClusterError("no more links\nand more")
        return report(question, {"table_wise": 0.4, "hot_cold": 0.1, "interleaved": 0.05})

    def nothing(*_: Any) -> None:
        return None

    for name, stand_in in (
        ("answer", answer_at_once),
        ("check_question", nothing),
        ("draw_report", nothing),
        ("why_unavailable", nothing),
    ):
        monkeypatch.setattr(suite, name, stand_in)
    return questions


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    folder = str(tmp_path / "answers")
    return lambda *more: main([*TINY, "--scenarios", "-o", folder, *more])


def test_one_failure_stops_nothing_and_only_it_runs_next_time(
    asked: list[Question], run: Callable[..., int], tmp_path: Path
) -> None:
    assert run() == 1
    assert len(asked) == len(SCENARIOS)
    assert {(question.batch_size, question.dim) for question in asked} == {(32, 8)}
    assert [question.rate_mbit for question in asked] == [1000, 1000, 100, 1000, 1000, None]
    rows = json.loads((tmp_path / "answers" / "summary.json").read_text())["scenarios"]
    verdicts = {row["name"]: row["verdict"] for row in rows}
    assert verdicts.pop("1gbit_dlrm") == "not run"
    assert set(verdicts.values()) == {"other sizes"}
    assert "not run: no more links |" in (tmp_path / "answers" / "summary.md").read_text()
    assert run() == 1
    assert [question.towers for question in asked[len(SCENARIOS) :]] == ["dlrm"]


def test_only_runs_the_named_ones_and_again_runs_them_again(
    asked: list[Question], run: Callable[..., int], tmp_path: Path
) -> None:
    names = ("--only", "loopback_thin", "--only", "1gbit_uniform")
    assert run(*names) == 0
    assert run(*names) == 0
    assert [question.data for question in asked] == ["uniform", "zipf"]
    curves = tmp_path / "answers" / "curves_2x1_1000mbit.json"
    written_at = curves.stat().st_mtime_ns
    assert run("--again", "--only", "1gbit_uniform") == 0
    assert len(asked) == 3
    assert curves.stat().st_mtime_ns > written_at


def test_what_no_link_changes_is_measured_once(
    asked: list[Question], run: Callable[..., int], tmp_path: Path
) -> None:
    names = ("1gbit_thin", "100mbit_thin", "1gbit_uniform", "loopback_thin")
    assert run(*itertools.chain.from_iterable(("--only", name) for name in names)) == 0
    first = str(tmp_path / "answers" / "curves_2x1_1000mbit.json")
    by_rate = dict(zip([question.rate_mbit for question in asked], local_costs_from))
    assert local_costs_from[0] is None
    assert by_rate[100] == first
    assert by_rate[None] is None  # its ranks have no hosts


def test_an_answer_to_another_question_is_not_overwritten(
    asked: list[Question], run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    only = ("--only", "loopback_thin")
    assert run(*only) == 0
    assert run(*only, "--rounds", "1") == 2
    assert len(asked) == 1
    error = capsys.readouterr().err
    assert "loopback_thin.json answers another question (rounds 6 there, 1 asked)" in error
    assert run(*only, "--rounds", "1", "--again") == 0
    assert asked[1].rounds == 1


def test_a_file_that_is_no_report_is_refused(
    asked: list[Question], run: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "1gbit_thin.json").write_text("{}")
    assert run("--only", "1gbit_thin") == 2
    (tmp_path / "answers" / "1gbit_thin.json").write_text("{")
    assert run("--only", "1gbit_thin") == 2
    assert not asked


def test_without_links_only_loopback_runs(
    asked: list[Question], run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "why_unavailable", lambda: "no root")
    assert run("--only", "1gbit_thin", "--only", "loopback_thin") == 1
    assert [question.rate_mbit for question in asked] == [None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate-mbit", "0"), "--rate-mbit with --scenarios"),
        (("--towers", "dlrm"), "--towers with --scenarios"),
        (("--plot", "out.png"), "--plot with --scenarios"),
        (("--variants", "hot_cold"), "no stock one to compare with"),
        (("-o", __file__), "expected a folder, found a file"),
    ],
)
def test_options_that_scenarios_do_not_take_are_refused(
    arguments: tuple[str, ...],
    message: str,
    asked: list[Question],
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not asked
