"""``plan``: a decision on the screen, as JSON and as a picture; files of something else refused.
``stats``: from files or a configuration to statistics, a table and a picture."""

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.app.cli.support import TINY_CONFIG, Capture, error_of, output_of
from tests.app.zoo.criteo_data import samples, write_parquet
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
    reasons = [why for why, _ in groupby(line["why"] for line in document["tables"])]
    assert [line.strip() for line in text.splitlines() if line.strip() in reasons] == reasons
    summary = document["summary"]
    assert set(summary["priced_ms"]) == {"stock", "rows", "bags", "mixed"}
    assert f"\npredicted without hot rows: stock {summary['priced_ms']['stock']:.1f} ms, " in text
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
    (["--memory-gib", "nan"], "--memory-gib"),
    (["--hot-rows", "-1"], "--hot-rows: expected at least 0, got -1"),
    (["--hot-rows", "100000000"], "--hot-rows: needs --stats"),
    (["--stats", "DIR/none"], "--stats DIR/none: no such file"),
    (["--curves", "DIR/none"], "--curves DIR/none: no such file"),
    (["--json", "DIR/no/plan.json"], "DIR/no"),
    (["--plot", "DIR/no/plan.png"], "DIR/no"),
    (["--plot", "DIR/plan.xyz"], "DIR/plan.xyz"),
    (["--memory-gib", "0.000001"], "bytes of ddr on rank 0, but a rank has 0 (1,073 "),
]


@pytest.mark.parametrize(
    ("options", "words"), REFUSALS, ids=[" ".join(item) for item, _ in REFUSALS]
)
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


def write(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.fixture
def clicks(tmp_path: Path) -> str:
    """600 clicks: three in ten on article 0, one in ten on article 20, the rest on 1 to 6."""
    place = np.arange(600) % 10
    article = np.where(place < 6, np.arange(600) // 100 + 1, np.where(place < 9, 0, 20))
    user = pa.array([[1, 2], [2], None] * 200)
    return write(tmp_path / "clicks.parquet", article=article, user=user)


def test_files_by_their_columns(tmp_path: Path, clicks: str, capsys: Capture) -> None:
    out = str(tmp_path / "stats.parquet")
    text = output_of(["stats", clicks, "--features", "article, user", "-o", out], capsys)
    stats = FrequencyStats.from_parquet(out)
    assert {name: counts.num_embeddings for name, counts in stats.tables.items()} == {
        "article": 21,
        "user": 3,
    }
    assert stats.num_samples == 600
    assert stats.tables["article"].num_lookups == 600
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["article"][1:5] == ["21", "600", "1.00", "8"]
    assert lines["user"][1:5] == ["3", "600", "1.00", "2"]
    assert "a batch of 4,096 samples has 8,192 lookups" in text
    assert text.endswith(f"wrote {out}\n")


def test_several_files_with_given_sizes_and_hashing(tmp_path: Path, capsys: Capture) -> None:
    files = [write(tmp_path / f"{i}.parquet", a=[i, 11], b=[5, 6]) for i in range(3)]
    out = str(tmp_path / "stats.parquet")
    sizes = ["--rows", "a=10,b=1_000", "--hash"]
    output_of(["stats", *files, "--features", "a,b", *sizes, "-o", out], capsys)
    stats = FrequencyStats.from_parquet(out)
    assert [counts.num_embeddings for counts in stats.tables.values()] == [10, 1000]
    assert stats.tables["a"].rows_U.tolist() == [0, 1, 2]
    assert stats.tables["a"].counts_U.tolist() == [1, 4, 1]
    output_of(["stats", *files, "--features", "a,b", "--rows", "12", "-o", out], capsys)
    assert [t.num_embeddings for t in FrequencyStats.from_parquet(out).tables.values()] == [12, 12]


def test_generated_data_of_a_configuration(tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(TINY_CONFIG)
    out = str(tmp_path / "stats.parquet")
    argv = ["stats", "--config", str(config), "--batches", "3", "--hot-rows", "5", "-o", out]
    text = output_of(argv, capsys)
    stats = FrequencyStats.from_parquet(out)
    specs = table_specs(load_config(config).data)
    stats.check_model({spec.name: spec.num_embeddings for spec in specs})
    assert (stats.num_batches, stats.num_samples) == (3, 48)
    assert "a batch of 16 samples has 64 lookups" in text
    assert "the 5 most frequent rows took " in text
    assert stats == FrequencyStats.from_parquet(out)


def test_the_configurations_own_file_is_read_unless_named(tmp_path: Path, capsys: Capture) -> None:
    data = write_parquet(tmp_path / "a.parquet", samples(32))
    file = tmp_path / "run.yaml"
    file.write_text(TINY_CONFIG.replace("num_tables: 4", f"path: {data}, max_rows: 50"))
    out = str(tmp_path / "stats.parquet")
    output_of(["stats", "--config", str(file), "-o", out], capsys)
    stats = FrequencyStats.from_parquet(out)
    assert (len(stats.tables), stats.num_samples) == (26, 32)


def test_a_picture_is_drawn(tmp_path: Path, clicks: str, capsys: Capture) -> None:
    out, plot = tmp_path / "stats.parquet", tmp_path / "stats.png"
    argv = ["stats", clicks, "--features", "article", "-o", str(out), "--plot", str(plot)]
    assert output_of(argv, capsys).endswith(f"wrote {out} and {plot}\n")
    assert plot.read_bytes().startswith(PNG)


def test_a_hot_set_is_judged(tmp_path: Path, clicks: str, capsys: Capture) -> None:
    out = str(tmp_path / "stats.parquet")
    argv = ["stats", clicks, "--features", "article", "--hot-rows", "1", "--batch-size", "50"]
    text = output_of([*argv, "-o", out], capsys)
    assert "the 1 most frequent rows took 30.0% of the lookups" in text
    assert "a batch of 50 samples has 50 lookups" in text


def test_a_feature_that_a_batch_lacks_stops_no_judgement(tmp_path: Path, capsys: Capture) -> None:
    """One lookup in a hundred samples: a batch of ten has none, rounded."""
    file = write(tmp_path / "a.parquet", rare=pa.array([4] + [None] * 99, pa.int64()))
    argv = ["stats", file, "--features", "rare", "--hot-rows", "1", "--batch-size", "10"]
    text = output_of([*argv, "-o", str(tmp_path / "stats.parquet")], capsys)
    assert "a batch has 0 distinct rows beside them" in text


OUT = ["-o", "OUT"]
CLICKS = ["CLICKS", "--features", "article", *OUT]
UNCOUNTED: list[tuple[list[str], str]] = [
    ([*CLICKS, "--batch-size", "0"], "--batch-size: expected at least 1, got 0"),
    ([*CLICKS, "--batches", "0"], "--batches: expected at least 1, got 0"),
    ([*CLICKS, "--hot-rows", "-1"], "--hot-rows: expected at least 1, got -1"),
    ([*CLICKS, "--max-rows-counted", "0"], "--max-rows-counted: expected at least 1, got 0"),
    (["CLICKS", "--features", "article", "-o", "DIR/no/a"], "--out DIR/no/a: there is no folder"),
    ([*CLICKS, "--plot", "DIR/no/a.png"], "--plot DIR/no/a.png: there is no folder DIR/no; make"),
    ([*CLICKS, "--plot", "DIR/a.xyz"], "--plot DIR/a.xyz: expected a name that ends in one of"),
    (["--config", "CONFIG", "--rows", "9", *OUT], "--rows: needs --features; --config has"),
    (["--config", "CONFIG", "--rows", "9", "--hash", *OUT], "--rows: needs --features; --config"),
    (["CLICKS", "--features", " ,", *OUT], "--features ' ,': expected column names, such as c1,c2"),
    ([*CLICKS, "--rows", "many"], "--rows many: expected N or c1=N,c2=N with whole numbers above"),
    ([*CLICKS, "--rows", "0"], "--rows 0: expected N or c1=N,c2=N with whole numbers above 0"),
    ([*CLICKS, "--rows", "5,6"], "--rows 5,6: '' is not among --features article"),
    ([*CLICKS, "--rows", "user=5"], "--rows user=5: 'user' is not among --features article"),
    (
        ["CLICKS", "--features", "article,user", "--rows", "user=5", "--hash", *OUT],
        "--hash: expected --rows for every feature, none for article",
    ),
    ([*CLICKS, "--hot-rows", "99"], "hot_rows is 99 for the tables"),
    (["CONFIG", "--features", "a", *OUT], "CONFIG: not readable as Parquet ("),
    (["DIR/none", "--config", "CRITEO", *OUT], "FILES: DIR/none: no such file"),
    (["CLICKS", "--config", "CRITEO", *OUT], "CLICKS: missing column c1, c2,"),
    (["CLICKS", "--config", "CONFIG", *OUT], "DataConfig: num_tables: a Criteo file feeds 26"),
    (["--config", "DIR/none", *OUT], "DIR/none"),
]


@pytest.fixture
def places(tmp_path: Path, clicks: str, config: str) -> dict[str, str]:
    """Returns what words of the refusals stand for; a Criteo file has all 26 tables."""
    out, criteo = str(tmp_path / "stats.parquet"), tmp_path / "criteo.yaml"
    criteo.write_text(TINY_CONFIG.replace("num_tables: 4", "max_rows: 50"))
    files = {"OUT": out, "CLICKS": clicks, "CONFIG": config, "CRITEO": str(criteo)}
    return {**files, "DIR": str(tmp_path)}


@pytest.mark.parametrize(("argv", "words"), UNCOUNTED, ids=[words for _, words in UNCOUNTED])
def test_what_cannot_be_counted_is_refused(
    argv: list[str], words: str, places: dict[str, str], capsys: Capture
) -> None:
    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    message = error_of(["stats", *map(placed, argv)], capsys)
    assert message.startswith(placed(words))


def test_a_step_is_simulated_on_many_ranks(
    tmp_path: Path, config: str, stats: str, curves_of: Callable[..., str], capsys: Capture
) -> None:
    out, plot = tmp_path / "steps.json", tmp_path / "steps.png"
    argv = ["simulate", "--config", config, "--ranks", "1", "2", "8", "--ranks-per-host", "2"]
    link = ["--link-mbit", "1000"]
    written = ["--json", str(out), "--plot", str(plot)]
    text = output_of([*argv, *link, *written], capsys)
    assert "Counted: the batches of all ranks, 256 samples each, of the configuration" in text
    clusters = json.loads(out.read_text())["clusters"]
    assert [(each["hosts"], each["ranks_per_host"]) for each in clusters] == [
        (1, 1),
        (1, 2),
        (4, 2),
    ]
    one, pair, eight = clusters
    assert [each["name"] for each in eight["priced"]] == ["rows", "node_rows", *KINDS[1:4]]
    assert [each["name"] for each in pair["priced"]] == ["rows", *KINDS[1:4]]
    assert all(each["across_bytes"] == 0 for each in one["priced"] + pair["priced"])
    assert sum(sum(each["sent_bytes"].values()) for each in one["priced"]) == 0
    rows, by_host, *stock = eight["priced"]
    assert by_host["across_bytes"] < rows["across_bytes"]
    assert all(each["step"]["step_ms"] > 0 for each in (rows, by_host, *stock))
    # flags, header, numbers, mask, clean and dirty rows, gradients
    assert (rows["messages"], by_host["messages"]) == (7 * 7, 7 * 4)
    assert plot.read_bytes().startswith(PNG)
    drawn = ["--curves", curves_of(), "--stats", stats, "--hot-rows", "9", "--micro-batches", "4"]
    text = output_of([*argv, *drawn, "--json", str(out)], capsys)
    assert "drawn from the statistics" in text
    rows = json.loads(out.read_text())["clusters"][2]["priced"][0]
    assert rows["sent_bytes"]["hot"] > 0
    first, *others = rows["chunk_shares"]
    # the first micro-batch has a tenth of the samples
    assert 0.1 < first < 0.4
    assert sum(others) == pytest.approx(1 - first)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--link-mbit", "0"], "--link-mbit: expected more than 0, got 0"),
        (["--link-mbit", "9", "--ranks", "1025"], "--ranks: expected 1 to 1,024, got 1025"),
        (["--link-mbit", "9", "--ranks", "6", "--ranks-per-host", "4"], "whole hosts of 4, got 6"),
        (["--link-mbit", "9", "--ranks-per-host", "17"], "--ranks-per-host: expected 1 to 16"),
        (["--link-mbit", "9", "--ranks", "2", "--hot-rows", "5"], "--hot-rows: needs --stats"),
        (["--link-mbit", "9", "--micro-batches", "0"], "--micro-batches: expected at least 1, got"),
        (["--link-mbit", "9", "--micro-batches", "257"], "--micro-batches: expected 1 to 256, the"),
        (["--link-mbit", "9", "--latency-ms", "-1"], "--latency-ms: expected at least 0 milli"),
        (["--link-mbit", "9", "--dense-ms", "nan"], "--dense-ms: expected at least 0 milliseconds"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    options: list[str], why: str, config: str, capsys: Capture
) -> None:
    assert why in error_of(["simulate", "--config", config, *options], capsys)
