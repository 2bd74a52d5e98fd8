"""Outcomes of cases: kept in a file, so that a rerun continues, shown and summed up."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.progress import Progress

FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """How a case went.

    Args:
        name: Name of the case.
        verdict: ``failed``, or a word of the benchmark for a case that went as it should.
        detail: Printed message, or the failure.
        losses_apart: Largest relative difference of the losses after it.
        resumed_from: Steps that the last start had from a checkpoint.
        after_s: Seconds from a fault until ranks went on or ended.
    """

    name: str
    verdict: str
    detail: str = ""
    losses_apart: float | None = None
    resumed_from: int | None = None
    after_s: float | None = None

    def write(self, path: Path) -> None:
        """Appends a line of JSON."""
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Outcomes of a file by name; a line that was cut off counts for nothing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines if line.endswith("}\n")]
    return {outcome.name: outcome for outcome in found}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


CaseT = TypeVar("CaseT", bound=_Named)


def outcomes_of(
    path: Path, cases: Sequence[CaseT], run: Callable[[CaseT], Outcome]
) -> Iterator[Outcome]:
    """Runs the cases that a file has no outcome of, and yields the outcomes of all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read_outcomes(path)
    for case in cases:
        if case.name not in known:
            known[case.name] = run(case)
            known[case.name].write(path)
        yield known[case.name]


def conclude(
    outcomes: Iterable[Outcome],
    path: Path,
    cases: str,
    num_cases: int,
    *verdicts: str,
    loss_rtol: float,
    by_kind: Callable[[str], str] | None = None,
) -> int:
    """Shows outcomes as they come, writes a summary, and prints it as a line.

    Args:
        outcomes: One for each case.
        path: File of the summary.
        cases: Name of the cases, in the summary and the line.
        num_cases: Number of cases.
        *verdicts: Verdicts that are counted beside ``failed``.
        loss_rtol: Allowed difference of losses, for the summary.
        by_kind: Kind of a case by its name; with it cases that did not fail are counted by kind.

    Returns:
        Exit code: 0 if no case failed, else 1.
    """
    progress, found = Progress(cases, num_cases), []
    for outcome in outcomes:
        found.append(outcome)
        if outcome.verdict == FAILED:
            progress.say(f"{outcome.name}: {outcome.detail}")
        progress.advance()
    progress.close()
    counts = Counter(outcome.verdict for outcome in found)
    apart = [outcome.losses_apart for outcome in found if outcome.losses_apart is not None]
    failed = {outcome.name: outcome.detail for outcome in found if outcome.verdict == FAILED}
    summary = {
        "loss_rtol": loss_rtol,
        cases: len(found),
        **{verdict: counts[verdict] for verdict in verdicts},
        "failed": failed,
        "losses_apart_at_most": max(apart, default=None),
    }
    if by_kind is not None:
        kinds = Counter(by_kind(outcome.name) for outcome in found if outcome.verdict != FAILED)
        summary["by_kind"] = dict(sorted(kinds.items()))
    write_result(summary, path)
    counted = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in (*verdicts, FAILED))
    print(f"{len(found):,} {cases}: {counted}{''.join(f'; {name}' for name in failed)}")
    return 1 if failed else 0
