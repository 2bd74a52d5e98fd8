"""``torchrec-picasso models``: what a configuration can train."""

from __future__ import annotations

import argparse
import inspect

from torchrec_picasso.app.zoo.kinds import DLRM, model_kinds
from torchrec_picasso.app.zoo.model_kinds import describe_groups, model_class

__all__ = ["run"]


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand."""
    for kind in model_kinds():
        print(kind)
        for line in describe_groups(kind):
            print(f"  reads {line}")
        print(f"  {_sizes(kind)}")


def _sizes(kind: str) -> str:
    if kind == DLRM:
        return "sizes: model.embedding_dim, model.dense_layers, model.over_layers"
    known = inspect.signature(model_class(kind)).parameters.values()
    sizes = [of for of in known if of.name not in ("embeddings", "num_dense")]
    return "sizes: " + ", ".join(f"{of.name}={_plain(of.default)}" for of in sizes)


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
