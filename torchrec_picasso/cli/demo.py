"""``torchrec-picasso demo``: stock TorchRec and this package, side by side, on the same batches."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_picasso.cli.report import Comparison, draw_comparison, print_comparison, write_json
from torchrec_picasso.config import (
    DataConfig,
    ModelConfig,
    ShardingConfig,
    TrainConfig,
)
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.launch.run_ranks import run_ranks
from torchrec_picasso.runs.compare import CompareSpec, compare_on_rank
from torchrec_picasso.zoo.model_kinds import DLRM, model_kinds, needs_clicks
from torchrec_picasso.zoo.registry import check_run

__all__ = ["add_parser", "run", "demo_spec"]

_EXAMPLE = """\
example:
  torchrec-picasso demo
  torchrec-picasso demo --data day_0.tsv --hot-rows 20000 --out criteo_demo
  torchrec-picasso demo --model din --batch-size 1024
"""

_MIN_STEPS = 10  # warm-up, counted steps and one timed block
_GENERATED_ROW_SCALE = 0.02  # 10 million rows become 200,000
_TIMEOUT_S = 3600


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``demo`` to the command line."""
    parser = subcommands.add_parser(
        "demo",
        help="compare stock TorchRec with this package",
        description=(
            "Trains one model twice from equal weights on the same batches: with TorchRec's best "
            "stock plan and with hot/cold sharding. Prints a table, writes demo.json and demo.png."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="Criteo samples, Parquet or tab-separated text; for models of histories Alimama's "
        "rows or Globo's clicks (default: generated samples)",
    )
    parser.add_argument(
        "--model",
        choices=model_kinds(),
        default=DLRM,
        metavar="NAME",
        help=f"any of `torchrec-picasso models` (default: {DLRM})",
    )
    for flag, default, text in (
        ("--steps", 30, "steps of each side"),
        ("--ranks", 2, "processes on this machine"),
        ("--batch-size", 4096, "samples per rank and step"),
        ("--hot-rows", 5000, "replicated rows, over all tables"),
        ("--dim", 64, "columns of every table"),
        ("--seed", 0, "seed of weights and generated samples"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--out", metavar="DIR", default="demo_out", help="folder of the results (default: demo_out)"
    )
    parser.set_defaults(run=run)


def demo_spec(args: argparse.Namespace) -> CompareSpec:
    """The comparison that the arguments ask for.

    Raises:
        ConfigError: If an argument is out of range.
    """
    if args.steps < _MIN_STEPS:
        raise ConfigError(f"--steps: expected at least {_MIN_STEPS}, got {args.steps}")
    config = TrainConfig(
        steps=args.steps,
        ranks=args.ranks,
        seed=args.seed,
        data=DataConfig(
            kind="clicks" if needs_clicks(args.model) else "criteo",
            path=args.data,
            batch_size=args.batch_size,
            row_scale=1.0 if args.data else _GENERATED_ROW_SCALE,
            heldout_steps=2,
        ),
        model=_model(args.model, args.dim),
        sharding=ShardingConfig(hot_rows=args.hot_rows),
    )
    spec = CompareSpec(config=config)
    spare = config.steps - spec.num_steps  # steps that fill no whole block go to the warm-up
    return CompareSpec(config=config, warmup_steps=spec.warmup_steps + spare)


def _model(kind: str, dim: int) -> ModelConfig:
    if kind == DLRM:
        return ModelConfig(embedding_dim=dim, dense_layers=(64,), over_layers=(64,))
    return ModelConfig(kind=kind, embedding_dim=dim)


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand.

    Raises:
        PicassoError: If an argument, the data or the output folder cannot be used.
        RankError: If a rank fails.
    """
    spec = demo_spec(args)
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: cannot make this folder ({error.strerror}); name another"
        ) from error
    check_run(spec.config, spec.config.ranks)
    result = run_ranks(compare_on_rank, spec.config.ranks, spec, timeout_s=_TIMEOUT_S)[0]
    comparison = Comparison(spec=spec, **result)
    print_comparison(comparison)
    write_json(comparison, folder / "demo.json")
    draw_comparison(comparison, folder / "demo.png")
    print(f"wrote {folder / 'demo.json'} and {folder / 'demo.png'}")
