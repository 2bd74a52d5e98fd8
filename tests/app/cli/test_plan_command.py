"""``plan``: a decision on the screen, as JSON and as a picture; files of something else refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.app.cli.support import TINY_CONFIG, Capture, error_of, output_of
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.zoo.tables import table_specs
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.frequency import FrequencyStats

PNG = b"\x89PNG"
KINDS = ("hot_cold", "table_wise", "row_wise", "column_wise", "data_parallel")


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(TINY_CONFIG.replace("batch_size: 16", "batch_size: 256"))
    return str(file)


@pytest.fixture
def stats(tmp_path: Path, config: str, capsys: Capture) -> str:
    """Of the configuration's own data."""
    file = str(tmp_path / "stats.parquet")
    output_of(["stats", "--config", config, "--batches", "20", "-o", file], capsys)
    return file


@pytest.fixture
def curves_of(tmp_path: Path) -> Callable[..., str]:
    def write(world_size: int = 2, device: str = "cpu", gbytes_per_s: float = 0.1) -> str:
        file = tmp_path / f"curves_{world_size}_{device}.json"
        CommCurves.assumed(
            world_size, gbytes_per_s=gbytes_per_s, backend="gloo", device=device
        ).to_json(file)
        return str(file)

    return write


def names_of(config: str) -> list[str]:
    return [spec.name for spec in table_specs(load_config(config).data)]


def test_a_plan_with_assumed_curves_and_no_statistics(config: str, capsys: Capture) -> None:
    text = output_of(["plan", "--config", config], capsys)
    first_words = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert [word for word in first_words if word in names_of(config)] == names_of(config)
    assert "\n2 ranks x 256 samples: " in text
    assert "predicted step: " in text
    assert "memory per rank: homes " in text


def test_a_plan_with_statistics_says_why_in_every_form(
    tmp_path: Path, config: str, stats: str, curves_of: Callable[..., str], capsys: Capture
) -> None:
    out, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    argv = ["plan", "--config", config, "--stats", stats, "--curves", curves_of()]
    text = output_of([*argv, "--json", str(out), "--plot", str(plot)], capsys)
    document = json.loads(out.read_text())
    assert set(document) == {"environment", "summary", "tables"}
    assert [line["table"] for line in document["tables"]] == names_of(config)
    for line in document["tables"]:
        assert {"rows", "dim", "placement", "hot_rows", "coverage", "why"} <= set(line)
        assert line["placement"] in KINDS
        assert 0 <= line["cold_rows"] <= line["unique_rows"] <= line["lookups"] == 256
        assert line["why"] in text
    summary = document["summary"]
    assert set(summary["priced_ms"]) == {"stock", "rows", "bags", "mixed"}
    assert (summary["world_size"], summary["batch_size"]) == (2, 256)
    assert summary["hot_cold_tables"] + summary["stock_tables"] == 4
    assert summary["hot_rows"] == sum(line["hot_rows"] for line in document["tables"])
    assert f"{summary['hot_cold_tables']} tables hot/cold" in text
    assert plot.read_bytes().startswith(PNG)
    assert f"wrote {out}" in text
    assert f"wrote {plot}" in text
    assert "warning" not in text


def test_a_total_of_hot_rows_is_kept_and_waves_are_those_of_the_configuration(
    tmp_path: Path, config: str, stats: str, capsys: Capture
) -> None:
    waves, out = tmp_path / "waves.yaml", tmp_path / "plan.json"
    waves.write_text(Path(config).read_text().replace("hot_rows: 20", "hot_rows: 20, num_waves: 2"))
    argv = ["plan", "--config", str(waves), "--stats", stats, "--hot-rows", "30"]
    output_of([*argv, "--json", str(out)], capsys)
    tables = json.loads(out.read_text())["tables"]
    assert sum(line["hot_rows"] for line in tables) == 30
    assert {line["placement"] for line in tables} == {"hot_cold"}
    assert {line["wave"] for line in tables} == {0, 1}


def test_the_world_size_is_that_of_the_curves_unless_given(
    config: str, curves_of: Callable[..., str], capsys: Capture
) -> None:
    argv = ["plan", "--config", config, "--curves", curves_of(world_size=4)]
    text = output_of(argv, capsys)
    assert "\n4 ranks x 256 samples" in text
    assert "warning" not in text
    assert "\n8 ranks x 256 samples" in output_of([*argv, "--world-size", "8"], capsys)


def test_curves_of_another_cluster_are_used_with_a_warning_that_names_both(
    config: str, curves_of: Callable[..., str], capsys: Capture
) -> None:
    curves = curves_of(world_size=4, device="cuda")
    argv = ["plan", "--config", config, "--curves", curves, "--world-size", "2"]
    text = output_of(argv, capsys)
    both = "curves of 4 ranks, backend gloo on cuda are used for 2 ranks, cpu"
    assert f"warning: {both}: times are extrapolated" in text
    assert "predicted step: " in text


REFUSALS: list[tuple[list[str], str]] = [
    (["--world-size", "1"], "--world-size: expected at least 2, got 1"),
    (["--world-size", "0"], "--world-size: expected at least 2, got 0"),
    (["--world-size", "-4"], "--world-size: expected at least 2, got -4"),
    (["--memory-gib", "nan"], "--memory-gib"),
    (["--hot-rows", "-1"], "hot_rows is -1 for"),
    (["--hot-rows", "100000000"], "hot_rows is 100000000 for"),
    (["--hot-rows", "5"], "hot_rows=5 requires the most frequent rows"),
    (["--stats", "DIR/none"], "there is no statistics file DIR/none"),
    (["--curves", "DIR/none"], "there is no curves file DIR/none"),
    (["--json", "DIR/no/plan.json"], "DIR/no"),
    (["--plot", "DIR/no/plan.png"], "DIR/no"),
    (["--plot", "DIR/plan.xyz"], "DIR/plan.xyz"),
    (["--memory-gib", "0.000001"], "bytes of ddr per rank, but a rank has 912"),
]


@pytest.mark.parametrize(("options", "words"), REFUSALS, ids=[" ".join(of) for of, _ in REFUSALS])
def test_what_cannot_be_planned_is_refused(
    options: list[str], words: str, tmp_path: Path, config: str, capsys: Capture
) -> None:
    placed = [option.replace("DIR", str(tmp_path)) for option in options]
    message = error_of(["plan", "--config", config, *placed], capsys)
    assert words.replace("DIR", str(tmp_path)) in message


def test_stats_and_plan_know_sequence_tables(tmp_path: Path, capsys: Capture) -> None:
    config, stats = tmp_path / "din.yaml", tmp_path / "stats.parquet"
    config.write_text(
        "data: {kind: clicks, batch_size: 64, max_history: 5}\n"
        "model: {kind: din, embedding_dim: 8}\n"
    )
    argv = ["--config", str(config)]
    output_of(["stats", *argv, "--batches", "8", "-o", str(stats)], capsys)
    counted = FrequencyStats.from_parquet(stats)
    assert set(counted.tables) == {"t_item", "t_category", "t_user", "t_device"}
    assert counted.tables["t_item"].feature_names == ("item", "item_history")
    printed = output_of(["plan", *argv, "--stats", str(stats)], capsys)
    assert all(f"\n{table} " in printed for table in counted.tables)
