"""Runs scenarios one after another into a folder, and goes on where it was cut off.

A scenario is done when its file is there: ``NAME.json`` is written whole, at the end. One that
fails does not stop the others. Scenarios on equal links share one file of curves, so the planner
decides from the same facts in all of them; on other links, the local costs of equal ranks.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster import ClusterError, why_unavailable
from benchmarks.pipelines.answer import answer, check_question, without_missing
from benchmarks.pipelines.picture import draw_report
from benchmarks.pipelines.question import Question
from benchmarks.pipelines.report import print_report, write_json, write_report
from benchmarks.pipelines.scenarios import SCENARIOS
from benchmarks.pipelines.summary import (
    SummaryRow,
    summary_row,
    summary_table,
    without_report,
)
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.errors import ConfigError, PicassoError

__all__ = ["run_scenarios"]


def run_scenarios(
    folder: Path,
    data: str,
    options: Mapping[str, Any],
    only: Sequence[str] = (),
    again: bool = False,
) -> int:
    """Runs what is not done yet and writes ``summary.json`` and ``summary.md``.

    Args:
        folder: Where everything goes; made if missing.
        data: A Criteo file, or data to generate.
        options: Arguments of :class:`Question` that replace the scenarios' own.
        only: Names of the scenarios to run; empty = all. The summary has all of them.
        again: Whether to run those that are done, too; curves are measured anew then.

    Returns:
        0, or 1 if a scenario that was to run did not.

    Raises:
        ConfigError: If the folder holds answers to other questions, or the options allow none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    questions = {s.name: without_missing(s.question(data, options)) for s in chosen}
    is_done = {
        name: not again and _holds(_report_file(folder, name), question)
        for name, (question, _) in questions.items()
    }
    if again:
        for file in folder.glob("curves_*.json"):
            file.unlink()
    failed: dict[str, str] = {}
    for scenario in chosen:
        if is_done[scenario.name]:
            print(f"{scenario.name}: done before")
            continue
        try:
            _run(scenario.name, folder, *questions[scenario.name])
        except (PicassoError, RankError, ClusterError) as error:
            failed[scenario.name] = str(error).partition("\n")[0]
            print(f"{scenario.name}: not run: {error}", file=sys.stderr)
        _summarize(folder, failed)
    print(summary_table(_summarize(folder, failed)), end="")
    return 1 if failed else 0


def _run(name: str, folder: Path, question: Question, left_out: dict[str, str]) -> None:
    print(f"{name}:", flush=True)
    if question.rate_mbit is not None and (reason := why_unavailable()) is not None:
        raise ConfigError(f"there are no links of {question.rate_mbit:g} Mbit/s here: {reason}")
    curves = str(_curves_file(folder, question))
    check_question(question, curves)
    report = answer(question, left_out, curves, _curves_on_other_links(folder, question))
    print_report(report)
    draw_report(report, folder / f"{name}.png")
    write_report(report, _report_file(folder, name))


def _holds(path: Path, question: Question) -> bool:
    """Whether a report answers the question; one to another question is never overwritten."""
    if not path.is_file():
        return False
    asked = json.loads(json.dumps(dataclasses.asdict(question)))
    answered = _read(path)["question"]
    differing = [
        f"{key} {answered.get(key)} there, {value} asked"
        for key, value in asked.items()
        if answered.get(key) != value
    ]
    if differing:
        raise ConfigError(
            f"{path} answers another question ({'; '.join(differing)}): name another folder, or "
            "--again to replace it"
        )
    return True


def _summarize(folder: Path, failed: Mapping[str, str]) -> list[SummaryRow]:
    """Rows of all scenarios, from the files that are there; also writes them."""
    rows = []
    for scenario in SCENARIOS:
        path = _report_file(folder, scenario.name)
        if scenario.name in failed or not path.is_file():
            rows.append(without_report(scenario, failed.get(scenario.name, "not yet")))
        else:
            rows.append(summary_row(scenario, _read(path)))
    write_json({"scenarios": [dataclasses.asdict(row) for row in rows]}, folder / "summary.json")
    (folder / "summary.md").write_text(summary_table(rows), encoding="utf-8")
    return rows


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no report ({error}): remove it") from error
    if not isinstance(document, dict) or "question" not in document:
        raise ConfigError(f"{path} is no report of a scenario: move it away")
    return document


def _report_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _curves_file(folder: Path, question: Question) -> Path:
    link = "loopback" if question.rate_mbit is None else f"{question.rate_mbit:g}mbit"
    return folder / f"{_curves_of_ranks(question)}{link}.json"


def _curves_on_other_links(folder: Path, question: Question) -> str | None:
    """A file of curves of the same hosts on links of another rate; loopback has no hosts."""
    if question.rate_mbit is None:
        return None
    found = sorted(folder.glob(f"{_curves_of_ranks(question)}*mbit.json"))
    return str(found[0]) if found else None


def _curves_of_ranks(question: Question) -> str:
    return f"curves_{question.hosts}x{question.ranks_per_host}_"
