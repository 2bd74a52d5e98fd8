"""``torchrec-picasso train``: trains the model of a YAML file, with checkpoints and resume."""

from __future__ import annotations

import argparse
import os

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from torchrec_picasso.app.cli.checks import resumes
from torchrec_picasso.app.cli.launcher import join_torchrun
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.launch.torchrun import under_torchrun
from torchrec_picasso.app.runs.profiling import check_profile
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.app.runs.watching import check_watch
from torchrec_picasso.app.zoo.registry import check_run


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    config = load_config(args.config)
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun() else config.ranks
    check_run(config, world_size)
    resume = resumes(config.checkpoint.folder, args.resume)
    check_watch(config.watch)
    profile = None
    if args.profile is not None:
        profile = check_profile(config, args.profile, args.profile_out)
    if not under_torchrun():
        job = (config, resume, None, profile)
        run_ranks(train_on_rank, world_size, *job, timeout_s=config.timeout_s)
        return
    device = join_torchrun(config.timeout_s, args.rank_order)
    try:
        train = record(train_on_rank)  # torchrun reports its errors
        train(dist.get_rank(), world_size, config, resume, device, profile)
        dist.barrier()  # no rank exits while another still communicates
    finally:
        dist.destroy_process_group()
