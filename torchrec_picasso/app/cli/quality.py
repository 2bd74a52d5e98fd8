"""``torchrec-picasso quality``: checks models against stock TorchRec and each other."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from torchrec_picasso.app.cli.checks import checks_of
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.runs.quality import Checker
from torchrec_picasso.errors import PicassoError


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    checker = Checker(folder=Path(args.config).parent, seed=args.seed)
    results: dict[str, dict[str, Any]] = {}
    start_s = time.monotonic()
    for name, check in checks_of(args).items():
        check_start_s = time.monotonic()
        if check.data is not None and not Path(check.data).exists():
            results[name] = {"passed_over": f"there is no {check.data}"}
            print(f"{name}: passed over, there is no {check.data}", flush=True)
            continue
        result = checker.check(check)
        seconds = time.monotonic() - check_start_s
        results[name] = {
            **{"kind": check.kind, "holds": result.holds, "found": result.summary},
            **{**result.figures, "seconds": round(seconds, 1)},
        }
        word = "holds" if result.holds else "FAILS"
        print(f"{name}: {word}: {result.summary}; {seconds:.0f} s", flush=True)
    if args.json is not None:
        seconds = round(time.monotonic() - start_s, 1)
        content = {"config": args.config, "seed": args.seed, "seconds": seconds, "checks": results}
        write_result(content, args.json)
    failed = [name for name, result in results.items() if result.get("holds") is False]
    if failed:
        raise PicassoError(f"{len(failed)} of the checks do not hold: {', '.join(failed)}")
