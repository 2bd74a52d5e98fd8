"""Faults while a model trains: does the next run go on as if nothing had been?

    python -m benchmarks.reliability.faults -o runs/faults
    python -m benchmarks.reliability.faults -o runs/faults --launchers run_ranks --seeds 2

A small DLRM is trained by the command's own code, with checkpoints every 4 of 24 steps, written
while training waits or while it goes on. Something strikes (KINDS in fault_cases.py), the run is
started again, by torchrun itself or as a user would, and must reach the losses and the AUC of a run
that nothing struck, from the last whole checkpoint on. A rank that raises or hangs must be named on
every rank, with its own message, within the process group's timeout.

FOLDER gets a line in faults.jsonl per case and a faults_summary.json; a rerun goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.command import command_parser
from benchmarks.reliability.fault_cases import (
    EVERY_STEPS,
    KINDS,
    LAUNCHERS,
    STEPS,
    WORLD_SIZE,
    Case,
    all_cases,
)
from benchmarks.reliability.fault_ranks import (
    GROUP_TIMEOUT_S,
    OWN_WORDS,
    named_on_rank,
    run_on_rank,
)
from benchmarks.reliability.outcomes import FAILED, Outcome, conclude, outcomes_of
from torchrec_picasso.app.checkpoints.folder import has_checkpoint, is_whole, step_of
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

LOSS_RTOL = 1e-5
"""Settings are tried again after a restart, so sums have other orders."""
_AUC_DIFFERENCE = 1e-3
_RESULTS, _SUMMARY = "faults.jsonl", "faults_summary.json"
_SURVIVED, _NAMED = "survived", "named"
_RUN_S, _JOB_S = 120, 240


class _FaultError(Exception):
    """A case did not go as it should."""


def inject(folder: Path, cases: Sequence[Case]) -> Iterator[Outcome]:
    """Injects the faults that a folder has no outcome of, and yields those of all."""
    folder.mkdir(parents=True, exist_ok=True)
    unbroken = _unbroken(folder)

    def run(case: Case) -> Outcome:
        work = folder / case.name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            outcome = _inject(work, case, unbroken)
        except (_FaultError, RankError, subprocess.TimeoutExpired) as error:
            return Outcome(case.name, FAILED, str(error))
        shutil.rmtree(work)
        return outcome

    return outcomes_of(folder / _RESULTS, cases, run)


def _unbroken(folder: Path) -> dict[str, Any]:
    """Result of a run without a fault."""
    kept = folder / "unbroken.json"
    if not kept.exists():
        work = folder / "unbroken"
        work.mkdir(exist_ok=True)
        config = _write_config(work, None)
        result, _ = run_ranks(run_on_rank, WORLD_SIZE, config, None, False, timeout_s=_RUN_S)[0]
        kept.write_text(json.dumps(result))
        shutil.rmtree(work)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def _inject(work: Path, case: Case, unbroken: Mapping[str, Any]) -> Outcome:
    config = _write_config(work, case)
    if case.kind in ("raise", "hang"):
        return _named(work, case, config)
    if case.launcher == "torchrun":
        result, said = _under_torchrun(work, case, config)
    else:
        result, said = _started_twice(work, case, config)
    apart = _losses_apart(result, unbroken)
    detail = next((line for line in said.splitlines() if "passed over" in line), "")
    return Outcome(case.name, _SURVIVED, detail, apart, resumed_from=result["first_step"])


def _write_config(work: Path, case: Case | None) -> str:
    """A small run's configuration; one that nothing strikes needs no checkpoints."""
    checkpoint = {"folder": None if case is None else str(work / "run"), "every_steps": EVERY_STEPS}
    document = {
        "ranks": WORLD_SIZE,
        "steps": STEPS,
        "timeout_s": _RUN_S,
        "data": {"batch_size": 16, "row_scale": 0.001, "num_tables": 4, "heldout_steps": 2},
        "model": {"embedding_dim": 8, "dense_layers": [8], "over_layers": [8]},
        "sharding": {"placement": "hot_cold", "hot_rows": 20},
        "optimizer": {"dense_optimizer": "adagrad"},
        "checkpoint": {**checkpoint, "async_save": case is not None and case.async_save},
    }
    path = work / "run.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML
    return str(path)


def _started_twice(work: Path, case: Case, config: str) -> tuple[dict[str, Any], str]:
    """Strikes a run, and starts it again as a user would."""
    args = (run_on_rank, WORLD_SIZE, config)
    try:
        run_ranks(*args, case, False, timeout_s=_RUN_S)
    except RankError as error:
        expected = {"disk_full": "No space left on device"}.get(case.kind, "SIGKILL")
        if expected not in error.what:
            raise
    else:
        raise _FaultError("the fault did not strike")
    damaged = _damage(work / "run", case) if case.kind in ("flip", "truncate") else ""
    resume = has_checkpoint(work / "run")
    result, said = run_ranks(*args, None, resume, timeout_s=_RUN_S)[0]
    if damaged and damaged not in said:
        raise _FaultError(f"damage was not told: {damaged}")
    if case.kind != "disk_full" and not damaged and case.kind == "kill_step":
        lost = case.step - result["first_step"]
        allowed = EVERY_STEPS * (2 if case.async_save else 1)  # the newest may be unfinished
        if not 0 <= lost <= allowed:
            raise _FaultError(f"{lost} steps were lost")
    return result, said


def _damage(run: Path, case: Case) -> str:
    """Damages a file of the newest checkpoint; gives its name as it must be told."""
    newest = max((p for p in run.iterdir() if is_whole(p)), key=lambda p: step_of(p.name) or 0)
    chance = case.chance
    path = chance.choice(sorted(p for p in newest.iterdir() if p.name != "SHA256SUMS"))
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    if case.kind == "flip":
        content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content if case.kind == "flip" else content[:at])
    return f"passed over {newest}: {path.name} is not what was written"


def _named(work: Path, case: Case, config: str) -> Outcome:
    """Every rank must tell of the rank that failed."""
    with mock.patch.dict(os.environ, FAULT_FOLDER=str(work)):
        raised = run_ranks(named_on_rank, WORLD_SIZE, config, case, str(work), timeout_s=_RUN_S)
    for rank, (kind, text, since_s) in enumerate(raised):
        if rank == case.rank:
            continue
        if case.kind == "raise":
            own = f"rank {case.rank} failed in step {{}}, forward 0: RuntimeError: {OWN_WORDS}"
            is_right = (kind, text) == ("PeerError", own.format(case.step + 1))
        else:
            is_right = (
                f"rank {case.rank} said nothing" in text and " waited in vain in step" in text
            )
        if not is_right or since_s > 2 * GROUP_TIMEOUT_S:
            raise _FaultError(f"rank {rank} raised {kind} after {since_s:.1f} s: {text}")
    return Outcome(case.name, _NAMED, raised[1 - case.rank][1])


def _under_torchrun(work: Path, case: Case, config: str) -> tuple[dict[str, Any], str]:
    """Strikes a job; torchrun restarts its ranks, or all of it is started again."""
    first = _Job(work, config, case)
    if case.kind == "kill_job":
        first.kill_when_struck()
        first = _Job(work, config, None)
    code = first.wait()
    if code or not (work / "result.json").exists():
        raise _FaultError(f"torchrun ended with {code}: {first.said()[-800:]}")
    return json.loads((work / "result.json").read_text()), first.said()


class _Job:
    """torchrun and its ranks."""

    def __init__(self, work: Path, config: str, case: Case | None) -> None:
        self._work = work
        self._log = work / f"log_{'first' if case else 'second'}.txt"
        name = case.name if case else "-"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(WORLD_SIZE), "--max-restarts", "2"]
        command += ["-m", "benchmarks.reliability.fault_ranks"]
        command += [config, str(work / "result.json"), name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT_FOLDER": str(work)}
        environment["PYTHONUNBUFFERED"] = "1"  # what was said before a kill is not lost
        with open(self._log, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def wait(self) -> int:
        """Gives the exit code."""
        try:
            return self._process.wait(_JOB_S)
        except subprocess.TimeoutExpired:
            self._kill()
            raise

    def kill_when_struck(self) -> None:
        """Ends the ranks and their launcher at once."""
        until_s = time.monotonic() + _JOB_S
        while not (self._work / "struck").exists():
            if self._process.poll() is not None or time.monotonic() > until_s:
                self._kill()
                raise _FaultError(f"the fault did not strike: {self.said()[-800:]}")
            time.sleep(0.05)
        self._kill()

    def said(self) -> str:
        """The printed text."""
        return self._log.read_text(encoding="utf-8")

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for path in self._work.glob("pid_*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
            path.unlink()


def _losses_apart(result: Mapping[str, Any], unbroken: Mapping[str, Any]) -> float:
    """Largest relative difference; an error if it is more than rounding."""
    expected = unbroken["losses"][result["first_step"] :]
    if len(expected) != len(result["losses"]):
        raise _FaultError(f"{len(result['losses'])} losses instead of {len(expected)}")
    apart = max((abs(a / b - 1) for a, b in zip(result["losses"], expected)), default=0.0)
    auc_apart = abs(result["auc"] - unbroken["auc"])
    if apart > LOSS_RTOL or auc_apart > _AUC_DIFFERENCE:
        raise _FaultError(f"losses differ by {apart:.1e}, AUC by {auc_apart:.1e}")
    return apart


def main(argv: Sequence[str] | None = None) -> int:
    """Injects all faults and prints a summary line.

    Returns:
        0 if every case went as it should, else 1.
    """
    args = _parser().parse_args(argv)
    cases = all_cases(args.launchers, args.kinds, args.seeds)
    return conclude(
        inject(args.out, cases),
        args.out / _SUMMARY,
        "faults",
        len(cases),
        *(_SURVIVED, _NAMED),
        loss_rtol=LOSS_RTOL,
        by_kind=lambda name: name.rpartition("-")[0],
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.reliability.faults", __doc__)
    add = parser.add_argument
    add("-o", "--out", type=Path, required=True, metavar="FOLDER", help="outcomes go there")
    add("--launchers", nargs="+", choices=LAUNCHERS, default=tuple(LAUNCHERS))
    add("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    add("--seeds", type=int, default=8, metavar="N", help="cases of a kind (default: 8)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
