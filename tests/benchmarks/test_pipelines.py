"""The comparison of pipelines and placements: names, arithmetic, and one whole tiny run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipelines.__main__ import _parser, _question, main
from benchmarks.pipelines.compare import curve_bytes
from benchmarks.pipelines.question import SCENARIOS, Question
from benchmarks.pipelines.rankings import rankings
from benchmarks.pipelines.runner import Block, RankResult, steps_past_checks
from benchmarks.pipelines.variants import parse_variant, pipeline_options
from tests.support.refusals import refusal_of
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import ConfigError

TINY = (
    *("--data", "zipf", "--rate-mbit", "0", "--batch-size", "32", "--dim", "8"),
    *("--max-rows", "300", "--heldout-steps", "1", "--rounds", "2", "--block-steps", "2"),
)
Run = tuple[dict[str, Any], Path]
"""What a run wrote, and where."""
STEPS = 11  # 3 to warm up, 2 counted, 2 blocks of 1 + 2
LOSS_TOLERANCE = 1e-4  # float32 sums in another order, over STEPS steps


def rank_result(name: str, blocks: list[Block], **changes: Any) -> RankResult:
    result = RankResult(
        variant=parse_variant(name),
        blocks=blocks,
        losses=[0.5],
        metered_bytes=10.0,
        collectives=5.0,
        tables={"table_wise": 26},
        hot_rows=0,
        trains_same_model=True,
    )
    return dataclasses.replace(result, **changes)


def block(*step_s: float, thread_share: float = 0.5, link_bytes: float | None = None) -> Block:
    thread_s = [seconds * thread_share for seconds in step_s]
    return Block(step_s=list(step_s), thread_s=thread_s, cpu_s=0.25, link_bytes=link_bytes)


@pytest.mark.parametrize(
    ("name", "hot_rows", "num_micro_batches", "lookahead"),
    [
        ("interleaved", None, None, None),
        ("interleaved:auto:7", 7, None, None),
        ("interleaved_no_lookahead", None, None, False),
        ("interleaved_no_lookahead:4:7", 7, 4, False),
    ],
)
def test_the_interleaved_pipeline_is_not_told_what_it_shall_choose(
    name: str, hot_rows: int | None, num_micro_batches: int | None, lookahead: bool
) -> None:
    variant = parse_variant(name)
    assert (variant.pipeline, variant.placement) == ("interleaved", "hot_cold")
    assert variant.hot_rows == hot_rows
    assert variant.needs_curves == (hot_rows is None)
    assert variant.chooses == (num_micro_batches is None)
    options = {"num_micro_batches": num_micro_batches, "lookahead": lookahead}
    assert pipeline_options(variant) == options


def test_the_tables_travel_in_as_many_waves_as_named() -> None:
    assert parse_variant("interleaved:2:7").num_waves == 1
    assert parse_variant("interleaved:2:7:3").num_waves == 3
    chosen = parse_variant("interleaved:auto:7:3")
    assert (chosen.num_micro_batches, chosen.hot_rows, chosen.num_waves) == (None, 7, 3)


@pytest.mark.parametrize(
    "name",
    [
        *("", "best", "table_wise:3", "hot_cold:-1", "hot_cold:1:2", "interleaved:0"),
        *("interleaved:2:3:0", "interleaved:2:3:4:5", "interleaved:2:auto", "fused:1"),
    ],
)
def test_an_unknown_variant_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"NAME is one of table_wise, row_wise") as refusal:
        parse_variant(name)
    assert repr(name) in str(refusal.value)


def test_a_step_lasts_as_long_as_on_its_slowest_rank() -> None:
    ranks = [
        [rank_result("table_wise", [block(0.1, 0.4), block(0.2, 0.2)])],
        [rank_result("table_wise", [block(0.3, 0.1), block(0.1, 0.1)])],
    ]
    standing = rankings(ranks, batch_size=10, ranks_per_host=1)["table_wise"]
    assert standing.block_step_ms == [pytest.approx([300, 400]), pytest.approx([200, 200])]
    # blocks of the slowest rank: 0.25 and 0.2 s per step
    assert standing.samples_per_s == pytest.approx(20 / 0.225)
    assert standing.cpu_s_per_step == pytest.approx(0.5)
    assert standing.exposed_share == pytest.approx(0.5)


def test_ratios_are_to_the_fastest_stock_variant_even_if_it_trains_another_model() -> None:
    ranks = [
        [
            rank_result("table_wise", [block(0.4, 0.4)] * 2, losses=[0.5, 0.4]),
            rank_result("column_wise", [block(0.2, 0.2)] * 2, losses=[1], trains_same_model=False),
            rank_result("hot_cold", [block(0.1, 0.1)] * 2, losses=[0.5, 0.3]),
        ]
    ]
    found = rankings(ranks, batch_size=10, ranks_per_host=1)
    assert {name: each.ratio for name, each in found.items()} == pytest.approx(
        {"table_wise": 0.5, "column_wise": 1.0, "hot_cold": 2.0}
    )
    assert found["hot_cold"].ratio_by_round == pytest.approx([2.0, 2.0])
    assert found["hot_cold"].max_loss_difference == pytest.approx(0.25)  # to table_wise


def test_link_bytes_are_those_of_the_busiest_host() -> None:
    ranks = [
        [rank_result("table_wise", [block(1, 1, link_bytes=sent)] * 2)]
        for sent in (5.0, 5.0, 7.0, 7.0)
    ]
    found = rankings(ranks, batch_size=10, ranks_per_host=2)["table_wise"]
    assert found.link_bytes_per_step == 7.0


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pipelines")
    curves = folder / "curves.json"
    CommCurves.assumed(2, gbytes_per_s=0.1).to_json(curves)
    names = ["table_wise", "column_wise", "hot_cold", "hot_cold:0", "hot_cold:20"]
    names += ["interleaved:2:20", "interleaved_no_lookahead:2:20"]
    files = ("--curves", str(curves), "-o", str(folder / "out.json"))
    assert main([*TINY, *files, "--variants", ",".join([*names, "fused"])]) == 0
    return json.loads((folder / "out.json").read_text()), folder


def test_all_variants_take_all_steps_and_the_losses_are_stocks(tiny_run: Run) -> None:
    document, _ = tiny_run
    same = {n: each for n, each in document["variants"].items() if each["trains_same_model"]}
    assert {"table_wise", "hot_cold", "hot_cold:0", "hot_cold:20"} <= set(same)
    for name, each in same.items():
        is_cut = (each["num_micro_batches"] or 1) > 1  # then turns wait until early checks are over
        assert (len(each["losses"]) > STEPS) if is_cut else (len(each["losses"]) == STEPS), name
        assert [len(block) for block in each["block_step_ms"]] == [2, 2], name
        assert each["max_loss_difference"] < LOSS_TOLERANCE, name
        stock = same["table_wise"]["losses"]
        assert each["losses"][:STEPS] == pytest.approx(stock, rel=LOSS_TOLERANCE)
    assert len(set(same["table_wise"]["losses"])) == STEPS  # it did train


def test_the_answer_tells_what_was_asked_and_what_was_left_out(tiny_run: Run) -> None:
    document, _ = tiny_run
    parts = "environment question variants probe_ms left_out floors"
    assert set(document) == set(parts.split())
    assert document["environment"]["torchrec-picasso"]
    assert document["question"]["rate_mbit"] is None
    assert {"table_wise", "column_wise"} <= set(document["probe_ms"])
    # TorchRec's fused pipeline either ran or says why not
    assert sum("table_wise+fused" in document[part] for part in ("left_out", "variants")) == 1
    assert document["floors"]["wire_ms"] is None
    assert document["floors"]["compute_ms"] > 0
    assert document["variants"]["hot_cold:20"]["hot_rows"] == 20
    assert document["variants"]["hot_cold:0"]["metered_bytes_per_step"] > 0


def test_the_answer_tells_the_schedule_that_was_used(tiny_run: Run) -> None:
    found = tiny_run[0]["variants"]
    assert found["hot_cold:20"]["num_micro_batches"] is None
    assert not found["hot_cold:20"]["is_interleaved"]
    assert found["interleaved:2:20"]["num_micro_batches"] == 2
    assert found["interleaved_no_lookahead:2:20"]["num_micro_batches"] == 2
    assert found["interleaved_no_lookahead:2:20"]["lookahead"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere.parquet"), "nowhere.parquet"),
        (("--variants", "hot_cold:0"), "no stock one to compare with"),
        (("--variants", "table_wise,best"), "'best'"),
        (("--max-rows", "9000000", "--dim", "4096"), "lower --max-rows"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal_of(main, [*TINY, *arguments], capsys)


@pytest.mark.parametrize(
    ("num_taken", "num_ahead", "expected"), [(3, 20, 13), (3, 47, 13), (3, 48, 61), (70, 300, 0)]
)
def test_turns_begin_after_early_checks(num_taken: int, num_ahead: int, expected: int) -> None:
    assert steps_past_checks(num_taken, num_ahead) == expected


def test_scenarios_are_questions_of_their_own() -> None:
    parse = _parser().parse_args
    loopback = _question(parse(["--data", "f", "--scenario", "loopback_thin", "--rounds", "1"]))
    assert (loopback.data, loopback.rate_mbit, loopback.rounds, loopback.batch_size) == (
        "f",
        None,
        1,
        4096,
    )
    assert "interleaved:8:0" in loopback.variants
    uniform = _question(parse(["--data", "f", "--scenario", "1gbit_uniform", "--rate-mbit", "0"]))
    assert (uniform.data, uniform.rate_mbit) == ("uniform", None)
    for name, asked in SCENARIOS.items():
        question = Question(**{"data": "f", **asked})
        assert any(parse_variant(one).pipeline == "interleaved" for one in question.variants), name
        # where a step takes seconds, only the stock plan that was the best with shorter ones
        num_stock = sum(parse_variant(each).is_stock for each in question.variants)
        assert num_stock == (1 if "rounds" in asked else 5), name


def test_curves_take_no_longer_on_a_slow_link() -> None:
    assert curve_bytes(None) == curve_bytes(1000.0) == curve_bytes(10_000.0) == 64 << 20
    assert curve_bytes(100.0) == pytest.approx((64 << 20) / 10, abs=1)
    assert curve_bytes(1.0) == 1 << 20
