"""All questions of reliability, one after another, and a report of what was found.

    python -m benchmarks.reliability -o runs/reliability --data-folder ../shared/data
    python -m benchmarks.reliability -o runs/reliability --only checkpoint_moves

Every question keeps what it has in the folder, so a run that was cut off goes on there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import command_parser
from benchmarks.reliability import (
    checkpoint_moves,
    drift,
    faults,
    link_faults,
    soak,
)
from torchrec_picasso.app.cli.outputs import write_result


@dataclass(frozen=True)
class _Question:
    """One command of this folder.

    Args:
        main: Takes its arguments and gives its exit code.
        results: Files that it leaves, by what the report calls them.
        sums_up: Makes a file's document into what the report has of it.
        needs_data: Whether it takes ``--data-folder``.
    """

    main: Callable[[Sequence[str]], int]
    results: Mapping[str, str]
    sums_up: Callable[[Mapping[str, Any]], dict[str, Any]]
    needs_data: bool = False


def _as_it_is(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("environment", "lines")}


def _sum_up_drift(document: Mapping[str, Any]) -> dict[str, Any]:
    shares = drift.moved_shares(document)
    return {
        "steps": document["num_steps"],
        "looks": len(shares),
        "moved_at_a_look": sum(shares) / len(shares),
        "loss_difference": document["loss_difference"],
        **(drift.summary_of(document) if len(document["by_hour"]) > 1 else {}),
    }


def _sum_up_soak(document: Mapping[str, Any]) -> dict[str, Any]:
    sides = {
        side: {key: value for key, value in document[side].items() if key != "looks_of_first_rank"}
        for side in ("ours", "stock")
    }
    weights = ("weights_compared", "weights_apart_at_most")
    return {
        "failed": document["failed"],
        "losses": document["losses"],
        **{key: document[key] for key in weights},
        **sides,
    }


def _summary_of(name: str) -> dict[str, str]:
    return {name: f"{name}_summary.json"}


_QUESTIONS = {
    "checkpoint_moves": _Question(
        checkpoint_moves.main, _summary_of("checkpoint_moves"), _as_it_is
    ),
    "faults": _Question(faults.main, _summary_of("faults"), _as_it_is),
    "link_faults": _Question(link_faults.main, _summary_of("link_faults"), _as_it_is),
    "soak": _Question(soak.main, {"soak": "soak.json"}, _sum_up_soak),
    "drift": _Question(
        drift.main,
        {"drift_globo": "drift_globo.json", "drift_criteo": "drift_criteo.json"},
        _sum_up_drift,
        needs_data=True,
    ),
}


def _ask(name: str, folder: Path, data: str | None) -> int:
    question = _QUESTIONS[name]
    if question.needs_data and data is None:
        print(f"{name}: passed over, it needs --data-folder", flush=True)
        return 0
    data_options = ["--data-folder", str(data)] if question.needs_data else []
    return question.main(["-o", str(folder), *data_options])


def _found(folder: Path) -> dict[str, Any]:
    """Results of the questions in the folder."""
    return {
        name: question.sums_up(json.loads((folder / file).read_text()))
        for question in _QUESTIONS.values()
        for name, file in question.results.items()
        if (folder / file).exists()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Asks, and writes ``report.json``.

    Returns:
        0; else what a question that failed returned.
    """
    parser = command_parser("benchmarks.reliability", __doc__)
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="results go there")
    parser.add_argument("--data-folder", metavar="FOLDER", help="real ids, for drift")
    parser.add_argument("--only", nargs="+", choices=_QUESTIONS, default=list(_QUESTIONS))
    args = parser.parse_args(argv)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    status = 0
    for name in args.only:
        status = _ask(name, folder, args.data_folder) or status
    write_result(_found(folder), folder / "report.json")
    print(json.dumps(_found(folder), indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
