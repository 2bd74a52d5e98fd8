"""Checks of what a subcommand is given, beside those of single arguments.

This file imports neither PyTorch nor TorchRec, so wrong input is told at once. Configurations need
pyyaml, which may be missing: only the functions that read them import it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_picasso.app.checkpoints.folder import check_run_folder, has_checkpoint
from torchrec_picasso.errors import ConfigError

if TYPE_CHECKING:
    from torchrec_picasso.app.config.quality import QualityCheck


def check_config(args: argparse.Namespace) -> None:
    """Refuses an unusable training configuration, if one is given."""
    from torchrec_picasso.app.config import load_config

    if args.config is not None:
        load_config(args.config)


def check_train(args: argparse.Namespace) -> None:
    """Refuses an unusable configuration, a missing checkpoint of ``--resume``, and a new run in the
    folder of another one."""
    from torchrec_picasso.app.config import load_config

    folder = load_config(args.config).checkpoint.folder
    check_run_folder(folder, resumes(folder, args.resume))


def resumes(folder: str | None, option: str | None) -> bool:
    """Whether a run continues an earlier one: by ``--resume``, or as torchrun started it again."""
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    is_restart = num_restarts > 0 and folder is not None
    if option == "auto" or (option is None and is_restart):
        return folder is None or has_checkpoint(folder)
    return option is not None


def check_convert(args: argparse.Namespace) -> None:
    """Refuses an existing file to write."""
    if Path(args.out).exists():
        raise ConfigError(f"--out {args.out}: exists already; move it away or name another file")


def check_quality(args: argparse.Namespace) -> None:
    """Refuses an unusable file of checks, and names that are not in it."""
    checks_of(args)


def checks_of(args: argparse.Namespace) -> Mapping[str, QualityCheck]:
    """The checks that ``quality`` runs, by name."""
    from torchrec_picasso.app.config.load import load_rules
    from torchrec_picasso.app.config.quality import QualityConfig

    checks = load_rules(QualityConfig, args.config).checks or {}
    unknown = [name for name in args.only or () if name not in checks]
    if unknown or not checks:
        raise ConfigError(
            f"{args.config}: there is no check {', '.join(unknown) or 'at all'}; "
            f"checks are {', '.join(checks) or 'none'}"
        )
    return {name: checks[name] for name in args.only or checks}


def check_stats(args: argparse.Namespace) -> None:
    """Refuses an unusable configuration, or unusable ``--features`` and ``--rows``."""
    check_config(args)
    if args.features is not None:
        rows_by_feature(args)


def rows_by_feature(args: argparse.Namespace) -> Mapping[str, int | None]:
    """The rows of each of ``--features`` by ``--rows``; ``None`` = the largest id + 1."""
    features = [name.strip() for name in args.features.split(",") if name.strip()]
    if not features:
        raise ConfigError(f"--features {args.features!r}: expected column names, such as c1,c2")
    rows = {**dict.fromkeys(features), **_parse_rows(args.rows, features)}
    unknown = [name for name, number in rows.items() if number is None]
    if args.hash and unknown:
        raise ConfigError(
            f"--hash: expected --rows for every feature, none for {', '.join(unknown)}"
        )
    return rows


def _parse_rows(text: str | None, features: Sequence[str]) -> Mapping[str, int]:
    """Parses ``1000`` or ``c1=1000,c2=5000`` into rows by feature."""
    if text is None:
        return {}
    pairs = [part.rpartition("=")[::2] for part in text.split(",")]
    if len(pairs) == 1 and not pairs[0][0]:
        pairs = [(name, pairs[0][1]) for name in features]
    rows = {}
    for name, number in pairs:
        if not number.strip().replace("_", "").isdigit() or int(number) < 1:
            raise ConfigError(f"--rows {text}: expected N or c1=N,c2=N with whole numbers above 0")
        if name.strip() not in features:
            raise ConfigError(
                f"--rows {text}: {name.strip()!r} is not among --features {', '.join(features)}"
            )
        rows[name.strip()] = int(number)
    return rows
