"""The command line: exit codes, one clear message, and whole runs with tiny settings.

``demo --model`` compares a model with stock TorchRec. That every model trains as under stock is
``tests/app/zoo/test_models.py``, and that every configuration trains ``test_configs.py`` there.
"""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.app.cli.support import TINY_CONFIG, Capture, error_of, output_of
from tests.app.zoo.criteo_data import samples, write_parquet, write_text
from tests.support.packaging import ROOT
from tests.support.processes import run_python
from torchrec_picasso.app.cli.arguments import make_parser
from torchrec_picasso.app.cli.demo import demo_spec
from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.cli.report import Comparison, change, print_comparisons
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.compare import CompareSpec, compare_on_rank
from torchrec_picasso.app.zoo.model_kinds import model_kinds

TINY_DEMO = ["--steps", "10", "--batch-size", "64", "--dim", "8", "--hot-rows", "200"]


@pytest.mark.parametrize(
    "command",
    ["", "demo", "doctor", "stats", "calibrate", "plan", "simulate", "train", "convert"],
)
def test_help(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "torchrec-picasso" in text
    assert not command or f"example:\n  torchrec-picasso {command}" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["demmo"], "invalid choice: 'demmo'"),
        (["train"], "required: --config"),
        (["demo", "--steps", "x"], "invalid int value: 'x'"),
        (["plan"], "required: --config"),
        (["plan", "--config", "c", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["plan", "--config", "c", "--world-size", "two"], "invalid int value: 'two'"),
        (["stats", "a", "--features", "f"], "required: -o/--out"),
        (["stats", "a", "-o", "b"], "--features --config is required"),
        (
            ["stats", "a", "--features", "f", "--config", "c", "-o", "b"],
            "not allowed with argument",
        ),
    ],
)
def test_bad_arguments(argv: list[str], words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "9"], "--steps: expected at least 10, got 9"),
        (["--ranks", "1"], "--ranks: expected at least 2, which share a link, got 1"),
        (["--rate-mbit", "-1"], "--rate-mbit: expected 0 to 1,000,000, got -1"),
        (["--dim", "10"], "--dim: expected a multiple of 4, got 10"),
        (["--data", "EMPTY"], "EMPTY: the file is empty; expected Criteo samples"),
        (["--out", "EMPTY"], "--out EMPTY: is a file; name a folder"),
    ],
)
def test_demo_bad_input(options: list[str], expected: str, tmp_path: Path, capsys: Capture) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    placed = [str(empty) if option == "EMPTY" else option for option in options]
    message = error_of(["demo", "--out", str(tmp_path / "out"), *placed], capsys)
    assert message.startswith(expected.replace("EMPTY", str(empty)))


def test_error_inside_a_rank_is_one_message(tmp_path: Path, capsys: Capture) -> None:
    """More hot rows than rows is found while planning, on the ranks."""
    argv = ["demo", *TINY_DEMO[:-1], "99999999", "--out", str(tmp_path)]
    message = error_of(argv, capsys).splitlines()[-1]
    assert "99999999" in message


def test_demo_end_to_end(tmp_path: Path, capsys: Capture) -> None:
    table = output_of(["demo", *TINY_DEMO, "--out", str(tmp_path)], capsys)
    for words in ("probed: table_wise", "largest loss difference", "MB sent per rank"):
        assert words in table
    document = json.loads((tmp_path / "demo.json").read_text())
    found = [link["link"] for link in document["links"]]
    assert found == ["loopback"] + ["1000 Mbit/s"] * ("not compared at" not in table)
    assert re.search(rf"^ +{' +'.join(found)}$", table, re.MULTILINE)
    for link in document["links"]:
        assert len(link["stock"]["losses"]) == len(link["ours"]["losses"]) == 10
        assert link["max_relative_loss_difference"] < 1e-5
        assert link["sent_bytes_ratio"] > 1
        pipeline = link["pipeline"]
        assert re.fullmatch(r"interleaved, \d+ micro-batch(es)? with(out)? lookahead", pipeline)
        assert f"; hot_cold {pipeline}\n" in table
        assert 0 < link["ours"]["hot_share"] <= 1
    assert document["environment"]["torchrec"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "demo.png"]


def test_without_a_namespace_a_line_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    table = output_of(["demo", *TINY_DEMO, "--out", str(tmp_path)], capsys)
    assert "\nnot compared at 1000 Mbit/s: unshare: No such file or directory\n" in table


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--help", "usage: torchrec-picasso"),
        ("plan --help", "usage: torchrec-picasso"),
        ("train --confg x", "usage: torchrec-picasso"),
        ("plan --config no.yaml", "cannot read the configuration"),
        ("demo --ranks -1234567", "expected at least 2, which share a link, got -1234567"),
        ("demo --batch-size -3", "--batch-size: expected at least 1, got -3"),
        ("demo --hot-rows -1", "--hot-rows: expected at least 0, got -1"),
        ("doctor --ranks 1", "--ranks: expected at least 2"),
        ("calibrate --ranks 0 -o c.json", "--ranks: expected at least 1"),
        ("calibrate -o no/c.json", "--out no/c.json: there is no folder no"),
        ("simulate --config c --link-mbit 0", "--link-mbit: expected more than 0, got 0"),
        ("train --config c --profile 0", "--profile: expected at least 1, got 0"),
        ("demo --data no.parquet", "--data no.parquet: no such file"),
        ("demo --seed -1", "--seed: expected at least 0, got -1"),
        ("stats no.parquet --features f -o s", "FILES: no.parquet: no such file"),
        ("plan --config c --curves no.json", "--curves no.json: no such file"),
        ("simulate --config c --link-mbit 9 --stats no", "--stats no: no such file"),
        ("convert --checkpoint no -o no.pt", "--checkpoint no: no such file"),
        ("quality --config no.yaml", "--config no.yaml: no such file"),
        ("calibrate -o .", "--out .: is a folder; name a file"),
        ("demo --out setup.py", "--out setup.py: is a file; name a folder"),
        ("stats --features a -o s --plot p.png", "the package matplotlib is not installed"),
        ("stats --features a -o s", "--features: needs FILES, at least one Parquet file"),
        ("stats setup.py --features a --hash -o s", "--hash: needs --rows, which ids are taken"),
        ("plan --config c --memory-gib 1e300", "more than 0 and at most 1e+18, got 1e+300"),
        ("plan --config c --hot-rows 5", "--hot-rows: needs --stats, which say what rows"),
        ("simulate --config c --link-mbit 9 --hot-rows 5", "--hot-rows: needs --stats"),
        ("train --config c --rank-order o.json", "o.json: ranks on one machine have no order of"),
        ("calibrate -o c.json --rank-order o.json", "o.json: ranks on one machine have no order"),
        (
            "train --config configs/dlrm_criteo.yaml --resume",
            "no checkpoint in it; expected f",
        ),
        ("convert --checkpoint docs -o setup.py", "--out setup.py: exists already; move it away"),
        ("quality --config configs/quality.yaml --only nver", "there is no check nver; checks are"),
        ("stats setup.py --features , -o s", "--features ',': expected column names, such as c1"),
        ("stats setup.py --features a --rows many -o s", "--rows many: expected N or c1=N,c2=N"),
        ("stats setup.py --features a,b --rows b=5 --hash -o s", "for every feature, none for a"),
        ("order -o o.json", "order: one machine has no order of hosts; start with torchrun on all"),
    ],
)
def test_help_and_wrong_arguments_need_no_pytorch(line: str, words: str) -> None:
    code = (
        "import sys; from torchrec_picasso.app.cli.main import main\n"
        "class NoMatplotlib:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'matplotlib': raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, NoMatplotlib())\n"
        f"try: main({line.split()})\n"
        "finally: assert not {'torch', 'torchrec', 'pandas'} & sys.modules.keys()"
    )
    done = run_python("-c", code)
    assert "AssertionError" not in done.stderr
    assert words in done.stdout + done.stderr


def test_a_closed_pipe_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    """``| head`` closes it."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        assert main(["models"]) == 1
    assert not capfd.readouterr().err


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for name in list(sys.modules):
        if name.startswith("torchrec_picasso.app.c"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "yaml", None)
    argv = ["train", "--config", str(ROOT / "configs" / "dlrm_criteo.yaml")]
    message = "the package pyyaml is not installed; pip install 'torchrec_picasso[app]' has all"
    assert error_of(argv, capsys).startswith(message)


def test_train_and_resume(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "run.yaml"
    folder = tmp_path / "checkpoints"
    watch = f"watch: {{tensorboard: {tmp_path / 'curves'}}}\n"
    file.write_text(TINY_CONFIG + f"checkpoint: {{folder: {folder}, every_steps: 4}}\n" + watch)
    argv = ["train", "--config", str(file)]
    assert main(argv) == 0
    assert (folder / "step_00000004").is_dir()
    assert "pass --resume to continue" in error_of(argv, capsys)
    file.write_text(file.read_text().replace("steps: 4\nlog", "steps: 6\nlog"))
    resumed = run_python("-m", "torchrec_picasso", *argv, "--resume")  # its ranks print, too
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {folder / 'step_00000004'} at step 4" in resumed.stdout
    assert "step 6 of 6: loss" in resumed.stdout
    assert "AUC 0." in resumed.stdout
    assert (folder / "step_00000006").is_dir()
    assert len(list((tmp_path / "curves").iterdir())) == 2  # one of each run, by rank 0
    file.write_text(f"watch: {{tensorboard: {file}}}\n")
    assert "TensorBoard needs a folder" in error_of(["train", "--config", str(file)], capsys)


def test_train_under_torchrun_with_a_file(tmp_path: Path) -> None:
    data = write_text(tmp_path / "day.tsv", samples(64))
    file = tmp_path / "run.yaml"
    settings = TINY_CONFIG.replace("num_tables: 4", f"path: {data}, max_rows: 50")
    file.write_text(settings.replace("steps: 4", "steps: 5", 1))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    picture = tmp_path / "steps.svg"
    argv = ("train", "--config", str(file), "--profile", "1", "--profile-out", str(picture))
    done = run_python(*torchrun, "-m", "torchrec_picasso", *argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 4 of 5: loss") == 1
    assert done.stdout.count(f"steps 3 to 3: timeline in {picture}\n") == 1
    assert "forward" in picture.read_text()


def test_train_bad_input(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("step: 3\n")
    message = error_of(["train", "--config", str(file)], capsys)
    assert message == f"{file}: 1 problem\n  step: unknown key; did you mean 'steps'?"
    data = write_parquet(tmp_path / "few.parquet", samples(20))
    file.write_text(f"data: {{path: {data}, batch_size: 16}}\n")
    assert "20 samples, but 160 are needed" in error_of(["train", "--config", str(file)], capsys)
    file.write_text(TINY_CONFIG)
    message = error_of(["train", "--config", str(file), "--profile-out", "a.svg"], capsys)
    assert message == "--profile-out: needs --profile N, the steps to draw"
    message = error_of(["train", "--config", str(file), "--profile", "1"], capsys)
    assert message.startswith("--profile 1: that takes 5 steps in a row without a checkpoint, and")
    file.write_text(TINY_CONFIG.replace("steps: 4", "steps: 9", 1))
    for picture, words in (
        ("nowhere/a.svg", "--profile-out nowhere/a.svg: there is no folder nowhere"),
        ("a.docx", "--profile-out a.docx: expected a name that ends in one of"),
    ):
        argv = ["train", "--config", str(file), "--profile", "1", "--profile-out", picture]
        assert error_of(argv, capsys).startswith(words)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    message = error_of(["train", "--config", str(file)], capsys)
    assert message.startswith("RANK is set, as torchrun does, but ")
    assert "MASTER_PORT" in message


TINY = ["--steps", "10", "--batch-size", "32", "--dim", "8"]
ALL_STOCK = "wide_deep"
"""The model that the planner places, stock as it would all; the others have hot rows."""


def tiny_spec(model: str) -> CompareSpec:
    """Returns what ``demo --model`` runs, on few clicks of a history and against one stock plan."""
    options = TINY if model == ALL_STOCK else [*TINY, "--hot-rows", "50"]
    spec = demo_spec(make_parser("0").parse_args(["demo", "--model", model, *options]))
    data = dataclasses.replace(spec.config.data, max_history=4, row_scale=0.0005)
    config = dataclasses.replace(spec.config, data=data)
    return dataclasses.replace(spec, config=config, stock=("table_wise",))


def compare_all(rank: int, world_size: int, specs: dict[str, CompareSpec]) -> dict[str, Any]:
    """Every comparison, one after the other; for the launcher."""
    return {model: compare_on_rank(rank, world_size, spec) for model, spec in specs.items()}


def test_every_model_is_compared(capsys: Capture) -> None:
    specs = {model: tiny_spec(model) for model in model_kinds()}
    assert len(specs) == 13
    longer = dataclasses.replace(specs["dlrm"].config, steps=20)
    specs["dlrm"] = dataclasses.replace(specs["dlrm"], config=longer, budget_s=0.0)
    results = run_ranks(compare_all, 2, specs, timeout_s=180)[0]
    for model, spec in specs.items():
        comparison = Comparison(link="loopback", spec=spec, **results[model])
        print_comparisons([comparison])
        out = capsys.readouterr().out
        assert model.upper() in out
        assert ("stock tables on both sides" in out) == (model == ALL_STOCK), model
        assert (comparison.ours.hot_cold_tables == 0) == (model == ALL_STOCK), model
        assert len(comparison.stock.losses) == len(comparison.ours.losses) == 10
        assert comparison.max_relative_loss_difference < 1e-4, model  # sums in another order


def test_other_models_have_smaller_defaults() -> None:
    parser = make_parser("0")
    dlrm, tbsm, hstu = (
        demo_spec(parser.parse_args(["demo", *options])).config
        for options in ([], ["--model", "tbsm"], ["--model", "hstu"])
    )
    assert (dlrm.data.batch_size, dlrm.model.embedding_dim) == (4096, 64)
    assert (tbsm.data.batch_size, tbsm.model.embedding_dim) == (512, 16)
    assert (hstu.data.kind, hstu.data.batch_size, hstu.data.num_tasks) == ("stream", 128, 2)
    assert dlrm.sharding.hot_rows is None
    assert demo_spec(parser.parse_args(["demo"])).budget_s == 18
    assert demo_spec(parser.parse_args(["demo", "--steps", "30"])).budget_s is None


@pytest.mark.parametrize(
    ("stock", "ours", "said"),
    [
        (2.0, 1.0, "2.00 x slower"),
        (1.0, 1.5, "1.50 x faster"),
        (1.0, 1.001, "equal"),
        (1.0, 0.0, ""),
    ],
)
def test_what_is_slower_is_called_slower(stock: float, ours: float, said: str) -> None:
    assert change(stock, ours, "slower", "faster") == said
