"""Sequences in the benchmark of fields: where samples come from, and whole tiny runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.fields.__main__ import main
from torchrec_picasso import CommCurves
from torchrec_picasso.app.zoo.data import alimama, globo
from torchrec_picasso.app.zoo.data.alimama import generate_alimama
from torchrec_picasso.app.zoo.data.click_files import read_clicks
from torchrec_picasso.app.zoo.data.shares import HELDOUT, TRAIN, Shares
from torchrec_picasso.errors import InputError

TINY = (
    *("--model", "sequences", "--batch-size", "16", "--rate-mbit", "0", "--max-rows", "1000"),
    *("--rounds", "2", "--block-steps", "2", "--heldout-steps", "1"),
)
LOSS_TOLERANCE = 1e-4  # float32 sums in another order, over some 11 to 100 steps
ALIMAMA_TARGETS = ["cate_id", "brand"]
NUM_CLICKS = 400


def globo_frame(num_clicks: int = NUM_CLICKS, num_users: int = 20) -> pd.DataFrame:
    """Clicks of few users on few articles, in a file that is not sorted by time."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({column: rng.integers(5, size=num_clicks) for column in globo.COLUMNS})
    frame["ts_ms"] = rng.permutation(num_clicks)
    frame["user"] = rng.integers(num_users, size=num_clicks)
    frame["article"] = rng.zipf(1.5, num_clicks) % 50
    return frame


@pytest.fixture(scope="module")
def globo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("globo") / "clicks.parquet"
    globo_frame().to_parquet(path)
    return path


def test_generated_clicks_have_the_shape_of_real_ones() -> None:
    clicks = generate_alimama()
    lengths = clicks.histories["brand"].lengths_n
    assert lengths.max() <= 50
    assert 0.4 < (lengths == 0).mean() < 0.45
    assert 12 < lengths.mean() < 20
    assert clicks.histories["cate_id"].lengths_n.tolist() == lengths.tolist()
    for column, ids in {**clicks.targets, **clicks.profiles}.items():
        assert ids.min() >= 1
        assert ids.max() < clicks.num_rows(column)


def test_missing_ids_are_row_0(tmp_path: Path) -> None:
    row: dict[str, list] = {column: [None, 7] for column in alimama.COLUMNS}
    row |= {"clk": [0, 1], "tag_category_list": [[], [2, 2]], "tag_brand_list": [[], [2, 2]]}
    pd.DataFrame(row).to_parquet(tmp_path / "a.parquet")
    clicks = read_clicks(tmp_path / "a.parquet")
    assert list(clicks.targets) == ALIMAMA_TARGETS
    assert clicks.targets["brand"].tolist() == [0, 8]
    assert [of.tolist() for of in clicks.histories["brand"]] == [[], [3, 3]]


def test_globos_clicks_are_those_of_a_loop_in_time_order(globo_file: Path) -> None:
    clicks = read_clicks(globo_file)
    assert clicks.in_time_order
    history = list(clicks.histories["article"])
    of_user: dict[int, list[int]] = {}
    sample = 0
    for num_seen, click in enumerate(globo_frame().sort_values("ts_ms").itertuples()):
        seen = of_user.setdefault(click.user, [])
        if num_seen:  # the first click has none before it that was not clicked
            assert clicks.clicked[sample] == 1
            assert clicks.targets["article"][sample] == click.article + 1
            assert clicks.profiles["user"][sample] == click.user + 1
            assert history[sample].tolist() == seen[-50:]
            sample += 1
            if sample < len(clicks) and clicks.clicked[sample] == 0:
                assert clicks.profiles["user"][sample] == click.user + 1
                assert history[sample].tolist() == seen[-50:]
                assert clicks.targets["article"][sample] != click.article + 1
                sample += 1
        seen.append(click.article + 1)
    assert sample == len(clicks) > 1.5 * NUM_CLICKS


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"clk": [1], "user_id": [3]}, "looks like Alimama's rows, but has no column 'user_id'"),
        ({"ts_ms": [1], "article": [3]}, "looks like Globo's clicks, but has no column 'user'"),
        ({"a": [1], "b": [1]}, "no column of .* or of .*, got a, b; expected Alimama's"),
    ],
)
def test_a_missing_column_is_named(
    tmp_path: Path, columns: dict[str, list[int]], says: str
) -> None:
    if "clk" in columns:
        columns = {name: [1] for name in alimama.COLUMNS if name != "user_id"}
    pd.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=says):
        read_clicks(tmp_path / "a.parquet")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("clk,buy\n")
    for name in ("a.parquet", "missing.parquet"):
        with pytest.raises(InputError, match=f"{name}: no Parquet file that can be read"):
            read_clicks(tmp_path / name)


def test_samples_in_time_order_are_taken_once_and_held_out_before() -> None:
    shares = Shares(
        num_samples=100, in_time_order=True, batch_size=8, world_size=2, seed=0, start=50
    )
    taken = [
        shares.samples(stream, rank, step).tolist()
        for stream, step in ((HELDOUT, 1), (HELDOUT, 0), (TRAIN, 0), (TRAIN, 1))
        for rank in (0, 1)
    ]
    assert [sample for batch in taken for sample in batch] == list(range(18, 82))
    assert shares.samples(TRAIN, 0, 3).tolist() == [98, 99, *range(6)]  # from the first again


@pytest.mark.parametrize(("kind", "ours"), [("generated", "all_rows"), ("globo", "all_rows_plain")])
def test_both_variants_train_the_same_model(
    tmp_path: Path, globo_file: Path, kind: str, ours: str
) -> None:
    data = [] if kind == "generated" else ["--data", str(globo_file)]
    names = ("table_wise", ours)
    out, curves = tmp_path / "out.json", tmp_path / "curves.json"
    CommCurves.assumed(2, gbytes_per_s=0.1, latency_ms=0.2).to_json(curves)  # saves measuring
    options = [*data, "--curves", str(curves), "--variants", ",".join(names), "-o", str(out)]
    assert main([*TINY, *options]) == 0
    written = json.loads(out.read_text())
    assert ("in time order" in written["trained"]) == (kind == "globo")
    stock, mine = (written["variants"][name] for name in names)
    assert len(set(stock["losses"])) == len(stock["losses"])  # it did train
    assert mine["losses"][: len(stock["losses"])] == pytest.approx(
        stock["losses"], rel=LOSS_TOLERANCE
    )
    num_tables = {"generated": 2 + 13, "globo": 1 + 7}[kind]
    assert mine["tables"] == {"hot_cold": num_tables}
    assert mine["metered_bytes_per_step"] < stock["metered_bytes_per_step"]
