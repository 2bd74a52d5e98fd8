"""The comparison on many fields: what a seed draws, who takes part, and whole tiny runs.

Of sequences, too: where their samples come from.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.fields.__main__ import main
from benchmarks.fields.columns import CLICK_COLUMNS, ColumnsWorkload
from benchmarks.fields.plans import deal_by_size
from benchmarks.fields.predicted import Predicted, errors_of
from benchmarks.fields.question import UNIFORM, Question
from benchmarks.fields.variants import AGAIN
from benchmarks.pipelines.memory import PeakMemory
from tests.support.refusals import refusal_of
from torchrec_picasso import CommCurves
from torchrec_picasso.app.zoo.data import alimama, globo
from torchrec_picasso.app.zoo.data.alimama import generate_alimama
from torchrec_picasso.app.zoo.data.click_files import read_clicks
from torchrec_picasso.app.zoo.data.criteo_files import ID_COLUMNS
from torchrec_picasso.errors import InputError

NAMES = ("table_wise", "planner", "ours_plain", "all_rows", "rows:2:7", "bags:2")
TINY = (
    *("--fields", "5", "--batch-size", "16", "--rate-mbit", "0", "--max-rows", "1500"),
    *("--rounds", "2", "--block-steps", "2", "--heldout-steps", "1"),
)
Run = tuple[dict[str, Any], str]
"""What a run wrote, and what it printed."""
LEAST_STEPS = 11  # 3 to warm up, 2 counted, 2 blocks of 1 + 2
LOSS_TOLERANCE = 1e-4  # float32 sums in another order, over some 11 to 100 steps


def test_the_largest_table_is_dealt_first_to_the_lightest_rank() -> None:
    assert deal_by_size([1, 9, 5, 4, 1], 2) == [0, 0, 1, 1, 1]
    assert deal_by_size([], 2) == []


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("fields")
    curves = folder / "curves.json"
    CommCurves.assumed(2, gbytes_per_s=0.001).to_json(curves)  # so slow that all is hot/cold
    files = ("--curves", str(curves), "-o", str(folder / "out.json"))
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: printed.append(" ".join(args)))
        assert main([*TINY, *files, "--variants", ",".join(NAMES)]) == 0
    return json.loads((folder / "out.json").read_text()), "\n".join(printed)


def test_all_variants_train_the_same_model(tiny_run: Run) -> None:
    found = tiny_run[0]["variants"]
    assert tuple(found) == NAMES
    stock = found["table_wise"]["losses"]
    assert len(stock) == LEAST_STEPS
    assert len(set(stock)) == LEAST_STEPS  # it did train
    for name, each in found.items():
        assert len(each["losses"]) >= LEAST_STEPS, name
        assert each["losses"][:LEAST_STEPS] == pytest.approx(stock, rel=LOSS_TOLERANCE), name
        assert each["max_loss_difference"] < LOSS_TOLERANCE, name
        assert [len(block) for block in each["block_step_ms"]] == [2, 2], name
        assert each["metered_bytes_per_step"] > 0, name
        assert sum(each["tables"].values()) == 5, name


def test_the_interleaved_pipeline_chose_before_the_clock_started(tiny_run: Run) -> None:
    document, _ = tiny_run
    all_rows = document["variants"]["all_rows"]
    assert all_rows["tables"] == {"hot_cold": 5}
    assert len(all_rows["losses"]) > LEAST_STEPS
    assert all_rows["num_micro_batches"] in (1, 2, 4, 8, 16)
    assert "the fastest of" in document["chose"]["all_rows"]
    assert document["variants"]["planner"]["num_micro_batches"] is None


def test_plans_made_by_hand_are_what_they_are_called(tiny_run: Run) -> None:
    found = tiny_run[0]["variants"]
    assert [found[name]["num_micro_batches"] for name in ("rows:2:7", "bags:2")] == [2, 2]
    assert [found[name]["hot_rows"] for name in ("rows:2:7", "bags:2")] == [7, 0]
    assert found["bags:2"]["tables"] == {"hot_cold": 5}
    printed = tiny_run[1]
    assert "  plan of table_wise: 5 table_wise" in printed
    assert "  plan of all_rows: 5 hot_cold with 0 hot rows; predicts" in printed


def test_predictions_are_beside_what_was_measured(tiny_run: Run) -> None:
    document, printed = tiny_run
    predicted, errors = document["predicted"], document["errors"]
    assert set(NAMES) - {"planner"} <= set(predicted)
    for name, each in predicted.items():
        measured = document["variants"][name]
        assert each["step_ms"] >= max(each["wire_ms"], each["compute_ms"]) * 0.999, name
        assert errors["step"][name] == pytest.approx(each["step_ms"] / measured["step_ms"][1] - 1)
        assert abs(errors["sent_bytes"][name]) < 0.3, name  # few samples: statistics are rough
        assert f"predicted for {name}: {each['step_ms']:.1f} ms" in printed
    assert errors["worst_step"] == max(map(abs, errors["step"].values()))
    assert errors["ours_over_best"] is None  # it does not take part


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells memory peaks")
def test_memory_of_a_variant_is_its_own(tiny_run: Run) -> None:
    freed = torch.ones(64 << 18)  # 64 MiB before
    del freed
    memory = PeakMemory()
    held = torch.ones(32 << 18)
    del held
    peak = memory.read()
    assert peak is not None
    assert 30 << 20 < peak < 48 << 20
    assert all("peak_bytes" in each for each in tiny_run[0]["variants"].values())


def _log(folder: Path, columns: tuple[str, ...]) -> str:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.integers(1 << 40, size=64) for name in columns})
    frame.loc[3, columns[0]] = None
    path = folder / "log.parquet"
    frame.astype("Int64").to_parquet(path)
    return str(path)


@pytest.mark.parametrize(
    ("columns", "num_tables"), [(ID_COLUMNS, 26), ((*CLICK_COLUMNS, "session_start"), 9)]
)
def test_a_log_is_in_time_order(columns: tuple[str, ...], num_tables: int, tmp_path: Path) -> None:
    path = _log(tmp_path, columns)
    question = Question(model="columns", data=path, batch_size=8, max_rows=10, dim=4)
    workload = ColumnsWorkload(question)
    assert len(workload.tables) == num_tables
    assert all(each.num_embeddings == 10 and each.dim == 4 for each in workload.tables)
    first = pd.read_parquet(path)[columns[1]].to_numpy() % 10
    seen = [
        workload.training(rank, 3)[step].sparse_features[columns[1]].values().tolist()
        for step in range(3)
        for rank in range(2)
    ]
    halves = [first[at : at + 8].tolist() for at in range(32, 64, 8)]
    assert seen == [*halves, *halves[:2]]  # two steps fill the second half, then again
    heldout = [b.sparse_features[columns[1]].values().tolist() for b in workload.heldout(2, 1)]
    assert heldout == [first[16:24].tolist(), first[24:32].tolist()]
    values = workload.training(0, 1)[0].sparse_features.values()
    assert 0 <= int(values.min()) <= int(values.max()) < 10


def test_uniform_ids_are_all_alike_often() -> None:
    question = Question(model="columns", data=UNIFORM, batch_size=50, max_rows=20, dim=4)
    batches = ColumnsWorkload(question).training(0, 20)
    ids = torch.cat([batch.sparse_features.values() for batch in batches])
    counts = torch.bincount(ids, minlength=20)
    assert int(counts.min()) > 0.8 * int(counts.max())


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    path = _log(tmp_path, ("a", "b"))
    with pytest.raises(InputError, match=r"neither Criteo's columns .* it has a, b"):
        ColumnsWorkload(Question(model="columns", data=path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--variants", "ours"), "no stock one to compare with"),
        (("--variants", "table_wise,best"), "'best'; the names are planner, table_wise"),
        (("--variants", "table_wise,bags:2:3"), "'bags:2:3'; the names are planner, table_wise"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal_of(main, [*TINY, *arguments], capsys)


TINY_SEQUENCES = (
    *("--model", "sequences", "--batch-size", "16", "--rate-mbit", "0", "--max-rows", "1000"),
    *("--rounds", "2", "--block-steps", "2", "--heldout-steps", "1"),
)
ALIMAMA_TARGETS = ["cate_id", "brand"]
NUM_CLICKS = 400


@pytest.fixture
def globo_file(tmp_path: Path) -> Path:
    """Clicks of few users on few articles, in a file that is not sorted by time."""
    rng, path = np.random.default_rng(0), tmp_path / "clicks.parquet"
    frame = pd.DataFrame({column: rng.integers(5, size=NUM_CLICKS) for column in globo.COLUMNS})
    frame["ts_ms"] = rng.permutation(NUM_CLICKS)
    frame["user"] = rng.integers(20, size=NUM_CLICKS)
    frame["article"] = rng.zipf(1.5, NUM_CLICKS) % 50
    frame.to_parquet(path)
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
    assert [each.tolist() for each in clicks.histories["brand"]] == [[], [3, 3]]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"clk": [1], "user_id": [3]}, "looks like Alimama's rows, but has no column 'user_id'"),
        ({"ts_ms": [1], "article": [3]}, "looks like Globo's clicks, but has no column 'user'"),
        ({"a": [1], "b": [1]}, "no column of .* or of .*, got a, b; expected Alimama's"),
    ],
)
def test_missing_column_is_named(tmp_path: Path, columns: dict[str, list[int]], says: str) -> None:
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


@pytest.mark.parametrize(("kind", "ours"), [("generated", "all_rows"), ("globo", "all_rows_plain")])
def test_both_variants_train_alike(tmp_path: Path, globo_file: Path, kind: str, ours: str) -> None:
    data = [] if kind == "generated" else ["--data", str(globo_file)]
    names = ("table_wise", ours)
    out, curves = tmp_path / "out.json", tmp_path / "curves.json"
    CommCurves.assumed(2, gbytes_per_s=0.1, latency_ms=0.2).to_json(curves)  # saves measuring
    options = [*data, "--curves", str(curves), "--variants", ",".join(names), "-o", str(out)]
    assert main([*TINY_SEQUENCES, *options]) == 0
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


def test_ours_is_compared_with_other_plans_alone() -> None:
    steps_ms = {"table_wise": 10.0, AGAIN: 8.0, "ours": 9.0, "all_rows": 12.0}
    found: dict[str, Any] = {
        name: SimpleNamespace(step_ms=(0.0, ms, 99.0), metered_bytes_per_step=1.0)
        for name, ms in steps_ms.items()
    }
    predicted = {"ours": Predicted(step_ms=9.0, wire_ms=0.0, compute_ms=0.0, sent_bytes=1.0)}
    errors = errors_of(predicted, found, 0.0)
    assert errors is not None
    assert errors.ours_over_best == 0.9
