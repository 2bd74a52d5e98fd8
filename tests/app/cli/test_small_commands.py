"""``convert``: from a run's folder to one file; ``calibrate``: measured curves of real ranks, in a
file that planning reads; ``doctor``: five lines within 20 s. What cannot be used is one clear line.
"""

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.app.cli.support import TINY_CONFIG, Capture, error_of, output_of
from torchrec_picasso.app.cli import doctor
from torchrec_picasso.app.cli import main as command_line
from torchrec_picasso.app.cli.calibrate import print_curves
from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.launch.environment import (
    KEEPS_FREED_MEMORY,
    describe_environment,
    other_hardware,
)
from torchrec_picasso.app.zoo.registry import build_model, make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.curves import COLLECTIVES
from torchrec_picasso.cost.local import LocalCosts


def test_a_run_becomes_one_file(tmp_path: Path, capsys: Capture) -> None:
    config, run, out = tmp_path / "run.yaml", tmp_path / "run", tmp_path / "model.pt"
    saving = f"checkpoint: {{folder: {run}, every_steps: 2, async_save: true}}\n"
    config.write_text(TINY_CONFIG + saving)
    output_of(["train", "--config", str(config)], capsys)
    assert sorted(path.name for path in run.iterdir()) == ["step_00000002", "step_00000004"]
    (run / "step_00000006.tmp").mkdir()
    said = output_of(["convert", "--checkpoint", str(run), "-o", str(out)], capsys)
    assert said == f"wrote {out}: 12 tensors, 0.4 MB, from {run / 'step_00000004'}\n"
    settings = load_config(config)
    model = build_model(settings, make_source(settings.data, settings.seed))
    plain = torch.load(out, weights_only=True)
    model.load_state_dict(plain, strict=True, assign=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    # another checkpoint by its own name, which is another state of the same model
    other = tmp_path / "other.pt"
    step_2 = str(run / "step_00000002")
    output_of(["convert", "--checkpoint", step_2, "-o", str(other)], capsys)
    before = torch.load(other, weights_only=True)
    assert before.keys() == plain.keys()
    assert not any(torch.equal(before[name], tensor) for name, tensor in plain.items())
    _refusals(tmp_path, capsys)


def _refusals(tmp_path: Path, capsys: Capture) -> None:
    run, out = tmp_path / "run", str(tmp_path / "new.pt")

    def refused(checkpoint: Path, out: str = out) -> str:
        return error_of(["convert", "--checkpoint", str(checkpoint), "-o", out], capsys)

    whole = tmp_path / "model.pt"
    assert refused(run, str(whole)) == (
        f"--out {whole}: exists already; move it away or name another file"
    )
    assert "there is no folder" in refused(run, str(tmp_path / "none" / "new.pt"))
    begun = tmp_path / "begun"
    (begun / "step_00000002.tmp").mkdir(parents=True)
    assert refused(tmp_path / "none").endswith("/none: no such file")
    for nothing in (whole, begun, begun / "step_00000002.tmp"):
        assert refused(nothing).startswith(f"{nothing}: no checkpoint in it; expected folders")
    newest = run / "step_00000004"
    next(iter(sorted(newest.glob("*.distcp")))).unlink()
    assert refused(newest) == f"{newest}: __0_0.distcp is missing; name another checkpoint"
    (newest / "SHA256SUMS").unlink()  # a checkpoint that has no sums
    assert refused(newest).startswith(f"{newest}: cannot be read (")
    (newest / ".metadata").write_text("something else")
    assert refused(newest).startswith(f"{newest}: cannot be read (")
    assert not list(tmp_path.glob("new.pt*"))


SMALLEST = ["--max-mib", "0.004", "--seconds", "0.001", "--no-local"]


def test_two_ranks_write_curves_that_planning_reads(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "curves.json"
    argv = ["calibrate", "--ranks", "2", "-o", str(out), *SMALLEST]
    argv[argv.index("0.004")] = "0.02"  # 4 and 16 KiB
    text = output_of(argv, capsys)
    curves = CommCurves.from_json(out)
    assert (curves.world_size, curves.ranks_per_host, curves.device) == (2, 2, "cpu")
    assert not curves.local.measured
    assert {"date_utc", "cpu", "torch"} <= set(curves.measured_on)
    for name in COLLECTIVES:
        assert len(curves.collectives[name].sent_bytes) == 2
        assert curves.ms(name, 4096) > 0
        assert f"\n  {name} " in text
    assert "\n2 ranks, 2 per host, gloo on cpu" in text
    assert "local work per step (assumed), ns per element:" in text
    assert "18 us per feature, 5.4 ms per step, however small\n" in text  # of hot/cold tables
    assert text.endswith(f"wrote {out}\n")
    assert list(tmp_path.iterdir()) == [out]


def test_steps_shorter_than_their_parts_are_told(capsys: Capture) -> None:
    costs = LocalCosts.newer_core()
    for step_ms, measured, is_told in ((0.0, True, True), (0.0, False, False), (4.3, True, False)):
        stock = dataclasses.replace(costs.stock, step_ms=step_ms)
        local = dataclasses.replace(costs, stock=stock, measured=measured)
        print_curves(CommCurves.assumed(2, gbytes_per_s=1.0, local=local))
        assert ("warning: steps of stock tables took less" in capsys.readouterr().out) == is_told


def test_a_dense_part_is_measured_without_its_tables(tmp_path: Path, capsys: Capture) -> None:
    out, config = tmp_path / "curves.json", tmp_path / "run.yaml"
    # tables that would not fit into any memory
    config.write_text(
        "data: {num_tables: 2, row_scale: 1.0, batch_size: 32}\n"
        "model: {embedding_dim: 8, dense_layers: [16], over_layers: [16]}\n"
    )
    argv = ["calibrate", "--ranks", "2", "-o", str(out), *SMALLEST, "--config", str(config)]
    text = output_of(argv, capsys)
    dense = CommCurves.from_json(out).dense
    assert dense.forward_ms > 0
    assert dense.backward_ms > 0
    assert dense.batch_size == 32
    towers = (13 + 1) * 16 + (16 + 1) * 8  # dense layers; those over them are more
    assert 4 * towers < dense.parameter_bytes < 8 * 4 * towers
    assert "dense part: forward " in text
    argv = ["plan", "--config", str(config), "--curves", str(out)]
    assert f"{dense.total_ms:.1f} ms of it dense" in output_of(argv, capsys)
    given = output_of([*argv, "--dense-ms", "250"], capsys)
    assert "250.0 ms of it dense" in given
    assert "the dense part not known" in output_of([*argv, "--dense-ms", "0"], capsys)
    assert "--dense-ms: expected at least 0 milliseconds, got -1" in error_of(
        [*argv, "--dense-ms", "-1"], capsys
    )


def test_a_small_budget_is_told_by_the_largest_size(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "curves.json"
    argv = ["calibrate", "--ranks", "2", "-o", str(out), "--no-local", "--budget", "1e-9"]
    text = output_of(argv, capsys)
    curves = CommCurves.from_json(out)
    line = next(line for line in text.splitlines() if line.startswith("  all_reduce "))
    assert line.endswith(" 0.016")  # MB, of an all-reduce of 16 KiB
    assert {len(curve.sent_bytes) for curve in curves.collectives.values()} == {2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-mib", "0.001"], "--max-mib: expected at least 0.00390625 (4 KiB), got 0.001"),
        (["--budget", "0"], "--budget: expected more than 0 seconds, got 0"),
        (["--budget", "nan"], "--budget: expected more than 0 seconds, got nan"),
        (["--ranks", "0"], "--ranks: expected at least 1, got 0"),
        (["-o", "DIR/no/c.json"], "--out DIR/no/c.json: there is no folder DIR/no; make it or"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, tmp_path: Path, capsys: Capture
) -> None:
    placed = [option.replace("DIR", str(tmp_path)) for option in options]
    argv = ["calibrate", "-o", str(tmp_path / "curves.json"), *SMALLEST, *placed]
    assert error_of(argv, capsys).startswith(words.replace("DIR", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


LINES = (
    r"versions: python [\d.]+, torch \S+, torchrec \S+, fbgemm-gpu.*, torchrec-picasso \S+",
    r"packages: torch, FBGEMM and TorchRec load together",
    r"machine: \d+ CPUs \(.*\); 2 ranks x \d+ threads?",
    r"link: all-to-all (\d+\.\d\d GB/s|not measured, the CPU is busy), "
    r"\d+\.\d\d ms latency between 2 ranks .*\(gloo\)",
    r"plan of the demo's DLRM on this link: \d+ tables hot/cold with [\d,]+ replicated rows, "
    r"\d+ stock; predicted step \d+\.\d ms, stock \d+\.\d ms",
)


def test_it_prints_versions_machine_link_and_plan(capsys: Capture) -> None:
    start_s = time.perf_counter()
    lines = output_of(["doctor"], capsys).splitlines()
    lines = [line for line in lines if not line.startswith("warning: other programs used the ")]
    assert time.perf_counter() - start_s < 20
    for line, expected in zip(lines, LINES, strict=True):
        assert re.fullmatch(expected, line), line


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    curves = CommCurves.assumed(2, gbytes_per_s=1.0, latency_ms=0.1)
    busy = [dataclasses.replace(curves, measured_on={"busy": "others"})]
    monkeypatch.setattr("torchrec_picasso.app.launch.run_ranks.run_ranks", lambda *_, **__: busy)
    assert "\nwarning: others\n" in output_of(["doctor"], capsys)


def without(*names: str) -> Callable[..., Any]:
    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in names else importlib.util.find_spec(name, package)

    return find_spec


@pytest.mark.parametrize(
    ("place", "names", "words"),
    [
        (
            command_line,
            ["torchrec"],
            "not installed: torchrec. Versions that load together: torch 2.13",
        ),
        (command_line, ["torch", "fbgemm_gpu"], "not installed: torch, fbgemm_gpu. Versions"),
        (doctor, ["yaml", "pyarrow"], "not installed: pyarrow, pyyaml; pip install 'torchrec_pic"),
    ],
)
def test_what_is_missing_is_one_line(
    place: Any, names: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(place, "find_spec", without(*names))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"torchrec-picasso: error: {words}")
    assert said.count("\n") == 1


def test_what_does_not_load_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def import_module(name: str) -> None:
        raise OSError(f"{name}: undefined symbol: _ZN3c10")

    monkeypatch.setattr(doctor, "import_module", import_module)
    assert main(["doctor"]) == 1
    last = "TorchRec does not load (OSError: torchrec: undefined symbol: _ZN3c10)\n"
    assert capsys.readouterr().err.endswith(last)


def test_one_rank_has_no_link(capsys: Capture) -> None:
    message = error_of(["doctor", "--ranks", "1"], capsys)
    assert message == "--ranks: expected at least 2, which share a link, got 1"


@pytest.mark.parametrize("given", [{}, {"MALLOC_TRIM_THRESHOLD_": "7"}, {"RANK": "0"}], ids=str)
def test_ranks_that_a_command_starts_keep_freed_memory(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    others = {name: os.environ[name] for name in os.environ if name not in KEEPS_FREED_MEMORY}
    monkeypatch.setattr(os, "environ", {**others, **given})
    error_of(["convert", "--checkpoint", "none", "-o", "none.pt"], capsys)
    # torchrun has started its ranks
    expected = {} if "RANK" in given else {**KEEPS_FREED_MEMORY, **given}
    found = {name: os.environ[name] for name in KEEPS_FREED_MEMORY if name in os.environ}
    assert found == expected
    said = describe_environment()["allocator"]
    assert ("MALLOC_MMAP_THRESHOLD_=1073741824" in str(said)) == bool(expected)


def test_curves_of_other_hardware_are_told() -> None:
    here = describe_environment()
    assert other_hardware({}) is None  # assumed curves
    assert other_hardware({**here, "date_utc": "2020-01-01", "torch": "1.0"}) is None
    assert other_hardware({**here, "cpu": "Z80", "num_cpus": 1}) == (
        f"cpu Z80, here {here['cpu']}; num_cpus 1, here {here['num_cpus']}"
    )
    assert other_hardware({**here, "vectors": "MMX"}) == f"vectors MMX, here {here['vectors']}"
    assert "allocator jemalloc, here " in str(other_hardware({**here, "allocator": "jemalloc"}))
