"""The scoreboard: every line can be trained, one tiny run, and a board of what is there; the
benchmark of row updates measures both ways on both kinds of input."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from benchmarks import row_update
from benchmarks.fields.__main__ import answer
from benchmarks.fields.zoo import ZooWorkload
from benchmarks.pipelines.report import write_report
from benchmarks.scoreboard.__main__ import main, question_of
from benchmarks.scoreboard.board import print_board, read_line
from benchmarks.scoreboard.entries import ENTRIES, FIELDS, train_config
from torchrec_picasso.app.zoo.kinds import model_kinds
from torchrec_picasso.app.zoo.tables import tables_of
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import InputError

BASELINES = {"logistic_regression", "pooled_history"}
"""What models are compared with for what they learn, not for their speed."""


def _options(**others: object) -> argparse.Namespace:
    usual = {"data_folder": None, "seed": 0, "rate_mbit": 0, "rounds": 2, "block_steps": 2}
    return argparse.Namespace(**{**usual, **others})


def test_every_model_has_a_line() -> None:
    assert {entry.model.kind for entry in ENTRIES.values()} == set(model_kinds()) - BASELINES


@pytest.mark.parametrize("name", ["deepfm", "dien", "mmoe", "dhen", "hstu"])
def test_a_line_has_tables_and_batches(name: str) -> None:
    config = train_config(name, None, seed=0)
    data = dataclasses.replace(config.data, batch_size=16, heldout_steps=2, max_rows=1000)
    workload = ZooWorkload(dataclasses.replace(config, data=data), world_size=2)
    tables = workload.tables
    model = workload.model()
    rows = {table.name: table.num_embeddings for table in tables_of(model)}
    assert {table.name: table.num_embeddings for table in tables} == rows
    for table in tables:
        assert any(f".{table.name}." in k for k in model.get_submodule(table.module).state_dict())
        assert table.ids_per_sample > 0
    assert len(list(workload.heldout(2, 2))) == 4
    assert len(workload.training(1, 3)) == 3


def test_the_sweep_over_fields_has_lines_too() -> None:
    for name, (num_fields, batch_size) in FIELDS.items():
        question = question_of(name, _options())
        assert (question.model, question.fields) == ("fields", num_fields)
        assert question.batch_size == batch_size
        assert question.zoo is None


def test_real_data_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .*criteo_tb_80k\.parquet; leave it out"):
        train_config("dlrm", str(tmp_path), 0)
    assert train_config("mmoe", str(tmp_path), 0).data.path is None  # two labels are generated
    argv = ["-o", str(tmp_path), "--data-folder", str(tmp_path), "--only", "din"]
    assert main(argv) == 2


def test_a_tiny_run_and_its_board(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = question_of("tbsm", _options())
    assert question.variants[-1] == "ours"
    data = dataclasses.replace(question.zoo.data, batch_size=16, max_rows=300)
    question = dataclasses.replace(
        question,
        zoo=dataclasses.replace(question.zoo, data=data),
        batch_size=16,
        local_costs=False,
        dense=False,
        heldout_steps=2,
    )
    path = tmp_path / "tbsm.json"
    curves = CommCurves.assumed(2, gbytes_per_s=0.1)  # saves measuring
    write_report(answer(question, curves), path)
    line = read_line("tbsm", path)
    assert line.times_stock > 0
    assert line.stock in ("table_wise", "planner")
    assert line.ours_bytes > 0
    print_board([line, dataclasses.replace(line, name="slow", compute_ms=1e6)])
    printed = capsys.readouterr().out
    assert "tbsm" in printed
    assert "the core has no more to give" in printed
    # what is there is not measured again
    assert main(["-o", str(tmp_path), "--only", "tbsm"]) == 0


def test_row_updates_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_ROWS", 2_000), ("_LOOKUPS_OF_A_RANK", 500), ("_BAGS", 400)):
        monkeypatch.setattr(row_update, name, size)
    found = row_update.measure(8, times=1)
    assert found["distinct_rows"] <= found["rows"] <= found["lookups"] == 1_000
    assert all(value > 0 for value in found.values())
