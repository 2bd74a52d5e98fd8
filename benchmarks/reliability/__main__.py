"""All questions of reliability, one after another, and a report of what was found.

    python -m benchmarks.reliability -o runs/reliability --data-folder ../shared/data
    python -m benchmarks.reliability -o runs/reliability --only checkpoint_moves

Every question keeps what it has in the folder, so a run that was cut off goes on there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command_parser
from benchmarks.reliability import checkpoint_moves, drift, faults, link_faults, soak
from torchrec_picasso.app.cli.outputs import write_result


def _as_it_is(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "environment"}


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


_MAINS = {
    "checkpoint_moves": checkpoint_moves.main,
    "faults": faults.main,
    "link_faults": link_faults.main,
    "soak": soak.main,
    "drift": drift.main,
}
_RESULTS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "checkpoint_moves": ("checkpoint_moves_summary.json", _as_it_is),
    "faults": ("faults_summary.json", _as_it_is),
    "link_faults": ("link_faults_summary.json", _as_it_is),
    "soak": ("soak.json", _sum_up_soak),
    "drift_globo": ("drift_globo.json", _sum_up_drift),
    "drift_criteo": ("drift_criteo.json", _sum_up_drift),
}
"""Files of results, by what the report calls them, and what the report has of each."""


def _ask(name: str, folder: Path, data: str | None) -> int:
    if name != "drift":
        return _MAINS[name](["-o", str(folder)])
    if data is None:
        print(f"{name}: passed over, it needs --data-folder", flush=True)
        return 0
    return _MAINS[name](["-o", str(folder), "--data-folder", data])


def _found(folder: Path) -> dict[str, Any]:
    """Results of the questions in the folder."""
    return {
        name: sum_up(json.loads((folder / file).read_text()))
        for name, (file, sum_up) in _RESULTS.items()
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
    parser.add_argument("--only", nargs="+", choices=_MAINS, default=list(_MAINS))
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
