"""``torchrec-picasso convert``: a training checkpoint as one file of an unsharded state dict."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_picasso.checkpoints.plain_file import find_checkpoint, read_plain, write_plain
from torchrec_picasso.cli.outputs import check_outputs
from torchrec_picasso.config import load_config
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.zoo.registry import build_model, make_source

__all__ = ["add_parser", "run"]

_EXAMPLE = """\
example:
  torchrec-picasso convert --config configs/dlrm_criteo.yaml --checkpoint runs/dlrm -o dlrm.pt
  torchrec-picasso convert --config configs/dlrm_criteo.yaml \\
      --checkpoint runs/dlrm/step_00000200 -o dlrm_200.pt
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``convert`` to the command line."""
    parser = subcommands.add_parser(
        "convert",
        help="turn a checkpoint into one plain file",
        description=(
            "Writes the weights of a training checkpoint, of any plan and number of ranks, as one "
            "unsharded state dict: model.load_state_dict(torch.load(FILE, weights_only=True)). "
            "Starts no ranks; needs as much memory as the model has weights."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML configuration it was trained with"
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FOLDER",
        help="one checkpoint, or a run's folder, of which the newest whole one is taken",
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="file to write")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand.

    Raises:
        PicassoError: If the configuration or the checkpoint cannot be used, or the file exists.
    """
    config = load_config(args.config)
    check_outputs(args, "out")
    if Path(args.out).exists():
        raise ConfigError(f"--out {args.out}: exists already; move it away or name another file")
    path = find_checkpoint(args.checkpoint)
    model = build_model(config, make_source(config.data, config.seed))
    plain = read_plain(path, model.state_dict())
    write_plain(plain, args.out)
    size_mb = sum(tensor.nbytes for tensor in plain.values()) / 1e6
    print(f"wrote {args.out}: {len(plain)} tensors, {size_mb:,.1f} MB, from {path}")
