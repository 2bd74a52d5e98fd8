"""``stats``: from files or a configuration to statistics, a table and a picture."""

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
from torchrec_picasso.frequency import FrequencyStats

PNG = b"\x89PNG"


def write(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(TINY_CONFIG)
    return str(file)


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


def test_generated_data_of_a_configuration(tmp_path: Path, config: str, capsys: Capture) -> None:
    out = str(tmp_path / "stats.parquet")
    argv = ["stats", "--config", config, "--batches", "3", "--hot-rows", "5", "-o", out]
    text = output_of(argv, capsys)
    stats = FrequencyStats.from_parquet(out)
    specs = table_specs(load_config(config).data)
    stats.check_model({spec.name: spec.num_embeddings for spec in specs})
    assert (stats.num_batches, stats.num_samples) == (3, 48)
    assert "a batch of 16 samples has 64 lookups" in text
    assert "the 5 most frequent rows took " in text
    assert stats == FrequencyStats.from_parquet(out)


def test_the_configurations_own_file_is_read_where_none_is_named(
    tmp_path: Path, capsys: Capture
) -> None:
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


def test_a_feature_that_a_batch_may_lack_does_not_stop_the_judgement(
    tmp_path: Path, capsys: Capture
) -> None:
    """One lookup in a hundred samples: a batch of ten has none, rounded."""
    file = write(tmp_path / "a.parquet", rare=pa.array([4] + [None] * 99, pa.int64()))
    argv = ["stats", file, "--features", "rare", "--hot-rows", "1", "--batch-size", "10"]
    text = output_of([*argv, "-o", str(tmp_path / "stats.parquet")], capsys)
    assert "a batch has 0 distinct rows beside them" in text


OUT = ["-o", "OUT"]
CLICKS = ["CLICKS", "--features", "article", *OUT]
REFUSALS: list[tuple[list[str], str]] = [
    ([*CLICKS, "--batch-size", "0"], "--batch-size: expected at least 1, got 0"),
    ([*CLICKS, "--batches", "0"], "--batches: expected at least 1, got 0"),
    ([*CLICKS, "--hot-rows", "-1"], "--hot-rows: expected at least 1, got -1"),
    ([*CLICKS, "--max-rows-counted", "0"], "--max-rows-counted: expected at least 1, got 0"),
    (["CLICKS", "--features", "article", "-o", "DIR/no/a"], "--out DIR/no/a: there is no folder"),
    ([*CLICKS, "--plot", "DIR/no/a.png"], "--plot DIR/no/a.png: there is no folder DIR/no; make"),
    ([*CLICKS, "--plot", "DIR/a.xyz"], "--plot DIR/a.xyz: expected a name that ends in one of"),
    (["--config", "CONFIG", "--rows", "9", *OUT], "--rows and --hash: the tables and ids are"),
    (["--config", "CONFIG", "--hash", *OUT], "--rows and --hash: the tables and ids are"),
    (["--features", "a", *OUT], "FILES: expected at least one Parquet file, got none"),
    ([*CLICKS, "--hash"], "--hash: expected --rows, which ids are taken modulo of; add --rows"),
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
    (["DIR/none", "--config", "CRITEO", *OUT], "DIR/none: no such file; give a Criteo file"),
    (["CLICKS", "--config", "CRITEO", *OUT], "CLICKS: missing column c1, c2,"),
    (["CLICKS", "--config", "CONFIG", *OUT], "DataConfig: num_tables: a Criteo file feeds 26"),
    (["--config", "DIR/none", *OUT], "DIR/none"),
]


@pytest.fixture
def places(tmp_path: Path, clicks: str, config: str) -> dict[str, str]:
    """What words of the refusals stand for; a Criteo file has all 26 tables."""
    out, criteo = str(tmp_path / "stats.parquet"), tmp_path / "criteo.yaml"
    criteo.write_text(TINY_CONFIG.replace("num_tables: 4", "max_rows: 50"))
    files = {"OUT": out, "CLICKS": clicks, "CONFIG": config, "CRITEO": str(criteo)}
    return {**files, "DIR": str(tmp_path)}


@pytest.mark.parametrize(("argv", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_what_cannot_be_counted_is_refused(
    argv: list[str], words: str, places: dict[str, str], capsys: Capture
) -> None:
    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    message = error_of(["stats", *map(placed, argv)], capsys)
    assert message.startswith(placed(words))
