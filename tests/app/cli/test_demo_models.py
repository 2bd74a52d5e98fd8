"""``demo --model`` compares a model with stock TorchRec.

That every model trains as under stock is ``tests/app/zoo/test_models.py``, and that every
configuration trains ``test_configs.py`` there.
"""

import dataclasses
import shutil
import subprocess
from typing import Any

import pytest

from tests.app.cli.support import Capture
from torchrec_picasso.app.cli import demo
from torchrec_picasso.app.cli.arguments import make_parser
from torchrec_picasso.app.cli.demo import demo_spec
from torchrec_picasso.app.cli.report import Comparison, change, print_comparison
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.compare import CompareSpec, compare_on_rank
from torchrec_picasso.app.zoo.model_kinds import model_kinds

TINY = ["--steps", "10", "--batch-size", "32", "--dim", "8"]


def tiny_spec(model: str) -> CompareSpec:
    """What ``demo --model`` runs, on few clicks of a history and against one stock plan."""
    spec = demo_spec(make_parser("0").parse_args(["demo", "--model", model, *TINY]))
    data = dataclasses.replace(spec.config.data, max_history=4, row_scale=0.0005)
    config = dataclasses.replace(spec.config, data=data)
    return dataclasses.replace(spec, config=config, stock=("table_wise",))


def compare_all(rank: int, world_size: int, specs: dict[str, CompareSpec]) -> dict[str, Any]:
    """Every comparison, one after the other; for the launcher."""
    return {model: compare_on_rank(rank, world_size, spec) for model, spec in specs.items()}


def test_every_model_is_compared(capsys: Capture) -> None:
    specs = {model: tiny_spec(model) for model in model_kinds()}
    assert len(specs) == 12
    longer = dataclasses.replace(specs["dlrm"].config, steps=20)
    specs["dlrm"] = dataclasses.replace(specs["dlrm"], config=longer, budget_s=0.0)
    results = run_ranks(compare_all, 2, specs, timeout_s=180)[0]
    for model, spec in specs.items():
        comparison = Comparison(spec=spec, **results[model])
        print_comparison(comparison)
        assert model.upper() in capsys.readouterr().out
        assert len(comparison.stock.losses) == len(comparison.ours.losses) == 10
        assert comparison.max_relative_loss_difference < 1e-4, model  # sums in another order


def test_other_models_have_smaller_defaults() -> None:
    parser = make_parser("0")
    dlrm, tbsm = (
        demo_spec(parser.parse_args(["demo", *options])).config
        for options in ([], ["--model", "tbsm"])
    )
    assert (dlrm.data.batch_size, dlrm.model.embedding_dim) == (4096, 64)
    assert (tbsm.data.batch_size, tbsm.model.embedding_dim) == (512, 16)
    assert dlrm.sharding.hot_rows is None
    assert demo_spec(parser.parse_args(["demo"])).budget_s == 40
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


def test_a_rate_is_set_on_a_loopback_of_its_own() -> None:
    command, shape = demo.shaped_loopback(1000, ranks=2)
    if shutil.which(command[0]) is None or subprocess.run((*command, "tc qdisc")).returncode:
        pytest.skip("no network namespace with tc can be had here")
    done = subprocess.run(
        (*command, f"{shape} && tc qdisc show dev lo"), capture_output=True, text=True, check=True
    )
    assert "tbf" in done.stdout
    assert "rate 2Gbit" in done.stdout


def test_at_a_rate_the_same_demo_is_started(
    monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    parser = make_parser("0")
    argv = ["demo", "--rate-mbit", "1000", "--steps", "12", "--model", "din", "--out", "a b"]
    args = parser.parse_args(argv)
    monkeypatch.setattr(demo, "shaped_loopback", lambda rate, ranks: (("sh", "-c"), "true"))
    monkeypatch.setattr(demo.sys, "executable", "printf")  # in place of Python
    monkeypatch.setattr(demo, "_PROGRAM", (r"%s\n",))
    assert demo.run_at_rate(args) == 0
    head, *started = capfd.readouterr().out.splitlines()
    assert head == "loopback held to 1000 Mbit/s for each rank"
    args.rate_mbit = None
    assert parser.parse_args(started) == args


def test_without_a_namespace_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    args = make_parser("0").parse_args(["demo", "--rate-mbit", "1000"])
    assert demo.run_at_rate(args) is None
    said = capsys.readouterr().out
    assert said == "on loopback, not at 1000 Mbit/s: unshare: No such file or directory\n"
