"""``torchrec-picasso train``: a model from a YAML file, with checkpoints and resume."""

from __future__ import annotations

import argparse
import os

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from torchrec_picasso.checkpoints.folder import has_checkpoint
from torchrec_picasso.cli.launcher import join_torchrun, under_torchrun
from torchrec_picasso.config import TrainConfig, load_config
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.launch.run_ranks import run_ranks
from torchrec_picasso.runs.profiling import ProfileRequest, check_profile
from torchrec_picasso.runs.train import check_checkpoint_folder, train_on_rank
from torchrec_picasso.runs.watching import check_watch
from torchrec_picasso.zoo.registry import check_run

__all__ = ["add_parser", "run"]

_NEWEST, _AUTO = "newest", "auto"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"

_EXAMPLE = """\
example:
  torchrec-picasso train --config configs/dlrm_criteo.yaml
  torchrec-picasso train --config configs/dlrm_criteo.yaml --resume
  torchrec-picasso train --config configs/dlrm_criteo.yaml --profile 3 --profile-out steps.svg
  torchrec-picasso train --config configs/din_taobao.yaml
  torchrun --nproc-per-node 2 -m torchrec_picasso train --config configs/dlrm_criteo.yaml
  torchrun --nproc-per-node 2 --max-restarts 3 -m torchrec_picasso train --config FILE --resume auto
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``train`` to the command line."""
    parser = subcommands.add_parser(
        "train",
        help="train a model from a configuration file",
        description=(
            "Trains a model, evaluates its AUC on held-out samples, writes checkpoints and resumes "
            "from them. Spawns its ranks, or uses those of torchrun."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=_NEWEST,
        choices=(_NEWEST, _AUTO),
        help="continue from the newest whole checkpoint; auto: or start where there is none, as "
        "torchrun's restarts do by themselves",
    )
    parser.add_argument(
        "--profile",
        type=int,
        metavar="N",
        help="draw when the operations of N steps ran, once the pipeline has found its setting",
    )
    parser.add_argument(
        "--profile-out",
        metavar="FILE",
        help="picture of --profile (default: CHECKPOINT_FOLDER.timeline.svg, or timeline.svg)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand.

    Raises:
        PicassoError: If the configuration, the data or the checkpoint folder cannot be used.
        RankError: If a spawned rank fails.
    """
    config = load_config(args.config)
    spawns = not under_torchrun()
    world_size = config.ranks if spawns else int(os.environ.get("WORLD_SIZE", "1"))
    check_run(config, world_size)
    resume = _resumes(config, args.resume)
    check_checkpoint_folder(config, resume)
    check_watch(config.watch)
    job = (config, resume)
    profile = _profile(config, args)
    if spawns:
        run_ranks(train_on_rank, world_size, *job, None, profile, timeout_s=config.timeout_s)
        return
    device = join_torchrun(config.timeout_s)
    try:
        train = record(train_on_rank)  # torchrun reports what it raises
        train(dist.get_rank(), world_size, *job, device, profile)
        dist.barrier()  # no rank leaves while another still works with it
    finally:
        dist.destroy_process_group()


def _resumes(config: TrainConfig, asked: str | None) -> bool:
    """Whether the run continues an earlier one."""
    is_restart = int(os.environ.get(_RESTARTS, "0")) > 0 and config.checkpoint.folder is not None
    if asked == _AUTO or (asked is None and is_restart):
        return config.checkpoint.folder is None or has_checkpoint(config.checkpoint.folder)
    return asked is not None


def _profile(config: TrainConfig, args: argparse.Namespace) -> ProfileRequest | None:
    if args.profile is not None:
        return check_profile(config, args.profile, args.profile_out)
    if args.profile_out is not None:
        raise ConfigError(f"--profile-out {args.profile_out}: needs --profile N, the steps to draw")
    return None
