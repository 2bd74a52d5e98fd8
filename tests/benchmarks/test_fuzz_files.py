"""A sample of damaged files; the benchmark of it notices what is wrong.

``python -m benchmarks.reliability.fuzz_files`` reads ten thousand.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.reliability import fuzz_files
from benchmarks.reliability.fuzz_files import Outcome, read_damaged, run_cases
from benchmarks.reliability.fuzz_mutations import mutated_document, yaml_attack
from benchmarks.reliability.fuzz_targets import TARGETS
from torchrec_picasso.errors import ConfigError

KINDS = ("config", "quality", "statistics", "curves", "hot_rows", "checkpoint")
"""All that the package reads."""
NUM_CASES = 300


def test_damaged_files_are_loaded_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["-o", str(tmp_path), "--cases", str(NUM_CASES), "--kinds", *KINDS]
    assert fuzz_files.main(options) == 0, (tmp_path / "fuzz_files_summary.json").read_text()
    summary = json.loads((tmp_path / "fuzz_files_summary.json").read_text())
    assert summary["failed"] == {}
    assert summary["loaded"] + summary["refused"] == summary["files"] >= NUM_CASES - len(KINDS)
    for kind in KINDS:
        assert summary["by_kind"][f"{kind} refused"] > 0
    monkeypatch.setattr(fuzz_files, "run_ranks", None)  # a rerun has nothing left to do
    assert fuzz_files.main(options) == 0


class _Reads(TARGETS["config"][0]):  # type: ignore[misc]
    """Does something with a file."""

    def __init__(self, use: Callable[[Path], None]) -> None:
        self.use = use


def _raises(error: Exception) -> Callable[[Path], None]:
    def use(path: Path) -> None:
        raise error

    return use


@pytest.mark.parametrize(
    ("use", "verdict", "detail"),
    [
        (lambda path: None, "loaded", ""),
        (_raises(ConfigError("a.yaml: no")), "refused", "a.yaml: no"),
        (_raises(ConfigError("no")), "failed", "the error does not name the file: no"),
        (_raises(ConfigError("a.yaml" * 999)), "failed", "a line of the error has over 2000"),
        (_raises(ConfigError("a.yaml Traceback")), "failed", "the error holds a traceback"),
        (_raises(KeyError("x")), "failed", "KeyError: 'x'"),
        (lambda path: bytearray(3 << 30), "failed", "took more than 1024 MiB"),
        (lambda path: (path.parent / "ran").touch(), "failed", "a command in the file ran"),
    ],
)
def test_what_is_no_clear_refusal_has_failed(
    tmp_path: Path, use: Callable[[Path], None], verdict: str, detail: str
) -> None:
    found = read_damaged(_Reads(use), tmp_path / "a.yaml", tmp_path / "ran")
    assert found[0] == verdict
    assert found[1].startswith(detail)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_ends_the_process_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(
        run: object, size: int, folder: str, seed: int, names: list[str], **_: object
    ) -> None:
        Outcome(names[0], "loaded").write(Path(folder, "fuzz_files.jsonl"))
        raise fuzz_files.RankError(0, "died with exit code 3")

    monkeypatch.setattr(fuzz_files, "run_ranks", run_here)
    verdicts = [outcome.verdict for outcome in run_cases(tmp_path, 0, {"config": 4})]
    assert verdicts == ["loaded", "failed", "loaded", "failed"]


def test_mutations_are_the_same_again_and_of_every_kind(tmp_path: Path) -> None:
    document = {"a": [1, {"b": 2.5}], "c": "x"}
    for number in range(200):
        one, other = (
            mutated_document(random.Random(number), document, odd_keys=True) for _ in range(2)
        )
        assert one[0] == other[0]
        assert repr(one[1]) == repr(other[1])
    assert document == {"a": [1, {"b": 2.5}], "c": "x"}
    names = {yaml_attack(random.Random(n), tmp_path)[0].split(",")[0] for n in range(2000)}
    assert {"object/apply", "laughs", "holds itself", "deep flow list"} <= names
    assert not os.listdir(tmp_path)
