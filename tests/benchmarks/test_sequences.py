"""The DIN-like model of the benchmark: its samples, its attention, and one whole tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks.fields.__main__ import main
from benchmarks.sequences.attention import AttentionUnit
from benchmarks.sequences.batches import FEATURES, draw_batch
from benchmarks.sequences.clicks import HISTORIES, PROFILES, generate_clicks, read_clicks
from torchrec_picasso.errors import InputError

NAMES = ("table_wise", "all_rows")
TINY = (
    *("--model", "sequences", "--batch-size", "16", "--rate-mbit", "0", "--max-rows", "1000"),
    *("--rounds", "2", "--block-steps", "2", "--heldout-steps", "1"),
    *("--contestants", ",".join(NAMES)),
)
LOSS_TOLERANCE = 1e-4  # float32 sums in another order, over some 11 to 100 steps


def test_generated_clicks_have_the_shape_of_real_ones() -> None:
    clicks = generate_clicks()
    lengths = np.array([of.size for of in clicks.history["tag_brand_list"]])
    assert lengths.max() <= 50
    assert 0.4 < (lengths == 0).mean() < 0.45
    assert 12 < lengths.mean() < 20
    categories = [of.size for of in clicks.history["tag_category_list"]]
    assert categories == lengths.tolist()
    for column in (*HISTORIES, *PROFILES):
        assert clicks.ids[column].min() >= 1
        assert clicks.ids[column].max() < clicks.num_rows(column)


def test_a_batch_is_the_same_again_and_inside_its_tables() -> None:
    clicks = generate_clicks()
    batch, again = (draw_batch(clicks, 20, [3, 1]).sparse_features for _ in range(2))
    assert batch.keys() == list(FEATURES)
    torch.testing.assert_close(batch.values(), again.values(), rtol=0, atol=0)
    for target, history in HISTORIES.items():
        assert batch[target].lengths().tolist() == [1] * 20
        assert int(batch[history].values().max()) < clicks.num_rows(target)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    pd.DataFrame({"clk": [1], "user_id": [3]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="no column 'adgroup_id'"):
        read_clicks(tmp_path / "a.parquet")


def test_missing_ids_are_row_0(tmp_path: Path) -> None:
    row = {column: [None, 7] for column in (*PROFILES, *HISTORIES)}
    lists = {column: [[], [2, 2]] for column in HISTORIES.values()}
    pd.DataFrame({"clk": [0, 1], **row, **lists}).to_parquet(tmp_path / "a.parquet")
    clicks = read_clicks(tmp_path / "a.parquet")
    assert clicks.ids["brand"].tolist() == [0, 8]
    assert [of.tolist() for of in clicks.history["tag_brand_list"]] == [[], [3, 3]]


def test_attention_is_that_of_a_loop_over_samples() -> None:
    torch.manual_seed(0)
    unit = AttentionUnit(dim=4, hidden=3)
    lengths = torch.tensor([2, 0, 3])
    rows, target = torch.randn(5, 4), torch.randn(3, 4)
    found = unit(target, JaggedTensor(values=rows, lengths=lengths))
    for sample, clicks in enumerate(rows.split(lengths.tolist())):
        expected = torch.zeros(4)
        for click in clicks:
            both = torch.cat([click, target[sample], click * target[sample]])
            expected = expected + unit.weigh(both) * click
        torch.testing.assert_close(found[sample], expected)


def test_both_contestants_train_the_same_model(tmp_path: Path) -> None:
    assert main([*TINY, "-o", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["contestants"]
    stock, ours = (found[name] for name in NAMES)
    assert len(set(stock["losses"])) == len(stock["losses"])  # it did train
    assert ours["losses"][: len(stock["losses"])] == pytest.approx(
        stock["losses"], rel=LOSS_TOLERANCE
    )
    assert ours["tables"] == {"hot_cold": len(HISTORIES) + len(PROFILES)}
    assert ours["metered_bytes_per_step"] < stock["metered_bytes_per_step"]
