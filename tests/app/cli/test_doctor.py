"""``doctor``: five lines within 20 s, or one line about what is missing."""

import importlib.util
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.app.cli.support import Capture, error_of, output_of
from torchrec_picasso.app.cli import doctor
from torchrec_picasso.app.cli import main as command_line
from torchrec_picasso.app.cli.main import main

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
    assert time.perf_counter() - start_s < 20
    for line, expected in zip(lines, LINES, strict=True):
        assert re.fullmatch(expected, line), line


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
