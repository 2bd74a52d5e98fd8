"""``torchrec-picasso demo``: compares stock TorchRec with this package on the same batches, on the
loopback and on a loopback that is held to a rate."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from torchrec_picasso.app.cli.calibrate import QUICK, calibrate_on_rank
from torchrec_picasso.app.cli.report import (
    Comparison,
    draw_comparisons,
    print_comparisons,
    write_json,
)
from torchrec_picasso.app.config import DataConfig, ModelConfig, ShardingConfig, TrainConfig
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.launch.shaped_loopback import (
    EnterNamespace,
    NamespaceError,
    shaped_loopback,
)
from torchrec_picasso.app.runs.compare import CompareSpec, compare_on_rank
from torchrec_picasso.app.zoo.kinds import DLRM
from torchrec_picasso.app.zoo.model_kinds import data_kind
from torchrec_picasso.app.zoo.registry import check_run
from torchrec_picasso.errors import ConfigError

_STEPS, _BUDGET_S = 30, 18.0  # fewer steps where the machine is slow; as many as asked for else
_GENERATED_ROW_SCALE = 0.02  # 10 million rows become 200,000
_BATCH_SIZE, _DIM = 4096, 64  # of a DLRM
_SMALL_BATCH_SIZE = 512  # of other models, whose dense parts take most of a step
_STREAM_BATCH_SIZE = 128  # of four candidates each
_CLICKS_DIM, _MAX_HISTORY = 16, 20  # attention or a recurrent layer over every click
_TIMEOUT_S = 3600


def demo_spec(args: argparse.Namespace) -> CompareSpec:
    """Builds the comparison; raises ConfigError if an argument does not fit the model."""
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
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: cannot make this folder ({error.strerror}); name another"
        ) from error
    check_run(spec.config, spec.config.ranks)
    comparisons = _compare_on_links(spec, args.rate_mbit)
    print_comparisons(comparisons)
    write_json(comparisons, folder / "demo.json")
    draw_comparisons(comparisons, folder / "demo.png")
    print(f"wrote {folder / 'demo.json'} and {folder / 'demo.png'}")
    return 0


def _compare_on_links(spec: CompareSpec, rate_mbit: float) -> list[Comparison]:
    """Compares on the loopback, then at a rate; prints a line if no loopback can have this rate."""
    comparisons = [_compare(spec, "loopback")]
    if rate_mbit:
        link = f"{rate_mbit:g} Mbit/s"
        try:
            with shaped_loopback(rate_mbit, spec.config.ranks) as enter_namespace:
                comparisons.append(_compare(spec, link, enter_namespace))
        except NamespaceError as error:
            print(f"not compared at {link}: {error}")
    return comparisons


def _compare(spec: CompareSpec, link: str, on_start: EnterNamespace | None = None) -> Comparison:
    """Measures a link, and compares the plans that suit it."""
    print(f"comparing: {link}", flush=True)
    ranks = spec.config.ranks
    settings: dict[str, Any] = {"timeout_s": _TIMEOUT_S, "on_start": on_start}
    with tempfile.TemporaryDirectory(prefix="picasso_demo_") as folder:
        file = Path(folder, "curves.json")
        run_ranks(calibrate_on_rank, ranks, *QUICK, **settings)[0].to_json(file)
        sharding = dataclasses.replace(spec.config.sharding, curves=str(file))
        config = dataclasses.replace(spec.config, sharding=sharding)
        spec = dataclasses.replace(spec, config=config)
        result = run_ranks(compare_on_rank, ranks, spec, **settings)[0]
    return Comparison(link=link, spec=spec, **result)
