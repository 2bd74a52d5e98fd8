"""``torchrec-picasso models``: lists the models that a configuration can train."""

from __future__ import annotations

import argparse

from torchrec_picasso.app.zoo.kinds import model_kinds
from torchrec_picasso.app.zoo.model_kinds import describe_groups, describe_sizes


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand."""
    for kind in model_kinds():
        print(kind)
        for line in describe_groups(kind):
            print(f"  reads {line}")
        print(f"  sizes: {describe_sizes(kind)}")
