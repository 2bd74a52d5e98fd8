"""``torchrec-picasso quality``: checks models against stock TorchRec and against each other."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from torchrec_picasso.app.config.load import load_rules
from torchrec_picasso.app.config.quality import QualityConfig
from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.app.runs.verdicts import Checker
from torchrec_picasso.errors import ConfigError, PicassoError

__all__ = ["run"]


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand.

    Raises:
        PicassoError: If a file cannot be used, or a check does not hold.
        RankError: If a rank fails.
    """
    checks = load_rules(QualityConfig, args.config).checks or {}
    unknown = [name for name in args.only or () if name not in checks]
    if unknown or not checks:
        raise ConfigError(
            f"{args.config}: there is no check {', '.join(unknown) or 'at all'}; "
            f"checks are {', '.join(checks) or 'none'}"
        )
    if args.json is not None and not Path(args.json).parent.is_dir():
        raise PicassoError(f"--json {args.json}: there is no such folder; make it first")
    checker = Checker(folder=Path(args.config).parent, seed=args.seed)
    found: dict[str, dict[str, Any]] = {}
    start_s = time.monotonic()
    for name in args.only or checks:
        wanted = checks[name]
        if wanted.data is not None and not Path(wanted.data).exists():
            found[name] = {"passed_over": f"there is no {wanted.data}"}
            print(f"{name}: passed over, there is no {wanted.data}", flush=True)
            continue
        began_s = time.monotonic()
        verdict = checker.check(wanted)
        seconds = time.monotonic() - began_s
        found[name] = {
            **{"kind": wanted.kind, "holds": verdict.holds, "found": verdict.found},
            **{**verdict.figures, "seconds": round(seconds, 1)},
        }
        word = "holds" if verdict.holds else "FAILS"
        print(f"{name}: {word}: {verdict.found}; {seconds:.0f} s", flush=True)
    if args.json is not None:
        _write(args, found, time.monotonic() - start_s)
    failed = [name for name, of in found.items() if of.get("holds") is False]
    if failed:
        raise PicassoError(f"{len(failed)} of the checks do not hold: {', '.join(failed)}")


def _write(args: argparse.Namespace, found: dict[str, dict[str, Any]], seconds: float) -> None:
    result = {
        "environment": describe_environment(),
        "config": args.config,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "checks": found,
    }
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
