"""``torchrec-picasso quality``: checks models against stock TorchRec and against each other."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_picasso.config import TrainConfig, load_config
from torchrec_picasso.config.load import load_rules
from torchrec_picasso.config.quality import ABOVE, QualityCheck, QualityConfig
from torchrec_picasso.errors import ConfigError, PicassoError
from torchrec_picasso.launch.run_ranks import run_ranks
from torchrec_picasso.runs.quality import (
    Scores,
    as_hot_cold,
    as_stock,
    paired_bootstrap,
    score_on_rank,
)
from torchrec_picasso.zoo.registry import check_run

__all__ = ["Verdict", "add_parser", "check", "run"]

_EXAMPLE = """\
example:
  torchrec-picasso quality --config configs/quality.yaml
  torchrec-picasso quality --config configs/quality.yaml --only din_parity deepfm_above_lr
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a check.

    Args:
        holds: Whether it does.
        found: What was measured, in words.
    """

    holds: bool
    found: str


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``quality`` to the command line."""
    parser = subcommands.add_parser(
        "quality",
        help="check that models train as stock does, and learn what they should",
        description=(
            "Runs checks: a model's losses and AUC are stock TorchRec's, or its AUC is above "
            "another model's. Fails if one does not hold."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of checks")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of them (default: all)")
    parser.set_defaults(run=run)


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
    failed = []
    for name in args.only or checks:
        wanted, folder = checks[name], Path(args.config).parent
        if wanted.data is not None and not Path(wanted.data).exists():
            print(f"{name}: passed over, there is no {wanted.data}", flush=True)
            continue
        verdict = check(wanted, folder)
        print(f"{name}: {'holds' if verdict.holds else 'FAILS'}: {verdict.found}", flush=True)
        failed += [] if verdict.holds else [name]
    if failed:
        raise PicassoError(f"{len(failed)} of the checks do not hold: {', '.join(failed)}")


def check(wanted: QualityCheck, folder: Path) -> Verdict:
    """Trains both sides of a check.

    Args:
        wanted: What is claimed.
        folder: Of its configurations.
    """
    config = _configured(wanted.config, wanted, folder)
    if wanted.kind == ABOVE:
        assert wanted.baseline is not None
        ours = _score(config)
        other = _score(_configured(wanted.baseline, wanted, folder))
        by = paired_bootstrap(ours, other)
        return Verdict(
            holds=by.low > wanted.least_margin,
            found=f"AUC {ours.auc:.4f} and {other.auc:.4f}, {by.difference:+.4f} "
            f"({by.low:+.4f} to {by.high:+.4f}) on {len(ours.labels_N):,} samples",
        )
    ours = _score(as_hot_cold(config, wanted.hot_rows, wanted.num_micro_batches))
    stock = _score(as_stock(config))
    losses, wanted_losses = np.array(ours.losses), np.array(stock.losses)
    loss_difference = float((np.abs(losses - wanted_losses) / np.abs(wanted_losses)).max())
    auc_difference = abs(ours.auc - stock.auc)
    return Verdict(
        holds=loss_difference <= wanted.max_loss_difference
        and auc_difference <= wanted.max_auc_difference,
        found=f"{len(losses)} losses within {loss_difference:.1e} of stock's, "
        f"AUC {ours.auc:.4f} and {stock.auc:.4f}",
    )


def _configured(name: str, wanted: QualityCheck, folder: Path) -> TrainConfig:
    config = load_config(folder / name)
    changes = {
        "path": wanted.data,
        "batch_size": wanted.batch_size,
        "heldout_steps": wanted.heldout_steps,
        "row_scale": wanted.row_scale,
    }
    data: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    sizes = {**(config.model.sizes or {}), **(wanted.sizes or {})}
    return dataclasses.replace(
        config,
        steps=wanted.steps,
        data=dataclasses.replace(config.data, **data),
        model=dataclasses.replace(config.model, sizes=sizes or None),
    )


def _score(config: TrainConfig) -> Scores:
    check_run(config, config.ranks)
    return run_ranks(score_on_rank, config.ranks, config, timeout_s=config.timeout_s)[0]
