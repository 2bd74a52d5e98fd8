"""``torchrec-picasso convert``: writes a checkpoint's weights as one unsharded state dict."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_picasso.app.checkpoints.plain_file import find_checkpoint, read_plain, write_plain
from torchrec_picasso.errors import ConfigError


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    if Path(args.out).exists():
        raise ConfigError(f"--out {args.out}: exists already; move it away or name another file")
    path = find_checkpoint(args.checkpoint)
    plain = read_plain(path)
    write_plain(plain, args.out)
    size_mb = sum(tensor.nbytes for tensor in plain.values()) / 1e6
    print(f"wrote {args.out}: {len(plain)} tensors, {size_mb:,.1f} MB, from {path}")
