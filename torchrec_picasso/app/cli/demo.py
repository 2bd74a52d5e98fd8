"""``torchrec-picasso demo``: compares stock TorchRec with this package on the same batches."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchrec_picasso.app.cli.report import (
    Comparison,
    draw_comparison,
    print_comparison,
    write_json,
)
from torchrec_picasso.app.config import DataConfig, ModelConfig, ShardingConfig, TrainConfig
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.compare import CompareSpec, compare_on_rank
from torchrec_picasso.app.zoo.kinds import DLRM
from torchrec_picasso.app.zoo.model_kinds import data_kind
from torchrec_picasso.app.zoo.registry import check_run
from torchrec_picasso.errors import ConfigError

_STEPS, _BUDGET_S = 30, 40.0  # fewer steps where the machine is slow; as many as asked for else
_MIN_STEPS = 10  # warm-up, counted steps and one timed block
_GENERATED_ROW_SCALE = 0.02  # 10 million rows become 200,000
_BATCH_SIZE, _DIM = 4096, 64  # of a DLRM
_SMALL_BATCH_SIZE = 512  # of other models, whose dense parts take most of a step
_STREAM_BATCH_SIZE = 128  # of four candidates each
_CLICKS_DIM, _MAX_HISTORY = 16, 20  # attention or a recurrent layer over every click
_TIMEOUT_S = 3600
_PROGRAM = ("-m", "torchrec_picasso")
_MIN_BURST_BYTES = 128 << 10  # a packet of the loopback has up to 64 KiB


def demo_spec(args: argparse.Namespace) -> CompareSpec:
    """Builds the comparison; raises ConfigError if an argument is out of range."""
    if args.steps is not None and args.steps < _MIN_STEPS:
        raise ConfigError(f"--steps: expected at least {_MIN_STEPS}, got {args.steps}")
    if args.rate_mbit is not None and not args.rate_mbit > 0:
        raise ConfigError(f"--rate-mbit: expected more than 0, got {args.rate_mbit:g}")
    kind = data_kind(args.model)
    has_histories = kind != "criteo"
    batch_size, dim = args.batch_size, args.dim
    if batch_size is None:
        batch_size = _STREAM_BATCH_SIZE if kind == "stream" else _SMALL_BATCH_SIZE
        batch_size = _BATCH_SIZE if args.model == DLRM else batch_size
    if dim is None:
        dim = _CLICKS_DIM if has_histories else _DIM
    towers: dict[str, Any] = {}
    if args.model == DLRM:
        towers = {"dense_layers": (64,), "over_layers": (64,)}
    config = TrainConfig(
        steps=args.steps or _STEPS,
        ranks=args.ranks,
        seed=args.seed,
        data=DataConfig(
            kind=kind,
            num_tasks=2 if kind == "stream" else 1,
            path=args.data,
            batch_size=batch_size,
            row_scale=1.0 if args.data else _GENERATED_ROW_SCALE,
            max_history=_MAX_HISTORY,
            heldout_steps=2,
        ),
        model=ModelConfig(kind=args.model, embedding_dim=dim, **towers),
        sharding=ShardingConfig(hot_rows=args.hot_rows),
    )
    spec = CompareSpec(config=config)
    spare = config.steps - spec.num_steps  # steps that fill no block are added to the warm-up
    return CompareSpec(
        config=config,
        warmup_steps=spec.warmup_steps + spare,
        budget_s=_BUDGET_S if args.steps is None else None,
    )


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code; raises PicassoError for unusable input."""
    spec = demo_spec(args)
    if args.rate_mbit is not None and (code := run_at_rate(args)) is not None:
        return code
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
    return 0


def run_at_rate(args: argparse.Namespace) -> int | None:
    """Runs the demo in a network namespace of its own; prints a line why where none can be had.

    Args:
        args: Of the demo, with ``rate_mbit``.

    Returns:
        The exit code; ``None`` where nothing ran.
    """
    command, shape = shaped_loopback(args.rate_mbit, args.ranks)
    try:
        tried = subprocess.run((*command, shape), capture_output=True, text=True, check=False)
        why = tried.stderr or f"exit code {tried.returncode}" if tried.returncode else ""
    except OSError as error:
        why = f"{command[0]}: {error.strerror}"
    if why:
        print(f"on loopback, not at {args.rate_mbit:g} Mbit/s: {' '.join(why.split())}")
        return None
    print(f"loopback held to {args.rate_mbit:g} Mbit/s for each rank", flush=True)
    given = vars(args).items() - {("command", "demo"), ("rate_mbit", args.rate_mbit)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given if value is not None]
    again = (f'{shape} && exec "$@"', "sh", sys.executable, *_PROGRAM, "demo")
    return subprocess.run((*command, *again, *flags), check=False).returncode


def shaped_loopback(rate_mbit: float, ranks: int) -> tuple[tuple[str, ...], str]:
    """How a shell gets a network namespace, and what it runs there to shape the loopback.

    Args:
        rate_mbit: Mbit/s of each rank.
        ranks: Ranks, which all send over the one loopback.
    """
    bits = int(rate_mbit * 1e6) * ranks
    burst = max(_MIN_BURST_BYTES, bits // 8000)  # what passes at once: 1 ms
    shape = (
        "PATH=$PATH:/usr/sbin:/sbin; ip link set dev lo up && "
        f"tc qdisc add dev lo root tbf rate {bits}bit burst {burst}b latency 50ms"
    )
    return ("unshare", "--map-root-user", "--net", "sh", "-c"), shape
