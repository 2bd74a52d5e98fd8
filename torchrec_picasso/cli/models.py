"""``torchrec-picasso models``: what a configuration can train."""

from __future__ import annotations

import argparse
import inspect

from torchrec_picasso.zoo.model_kinds import DLRM, describe_groups, model_class, model_kinds

__all__ = ["add_parser", "run"]

_EXAMPLE = """\
example:
  torchrec-picasso models
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``models`` to the command line."""
    parser = subcommands.add_parser(
        "models",
        help="list the models that a configuration can name",
        description="Lists models, the groups of columns that each reads and its sizes.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


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
