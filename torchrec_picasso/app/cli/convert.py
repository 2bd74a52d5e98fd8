"""``torchrec-picasso convert``: writes a checkpoint's weights as one unsharded state dict."""

from __future__ import annotations

import argparse

from torchrec_picasso.app.checkpoints.plain_file import find_checkpoint, read_plain, write_plain


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    path = find_checkpoint(args.checkpoint)
    plain = read_plain(path)
    write_plain(plain, args.out)
    size_mb = sum(tensor.nbytes for tensor in plain.values()) / 1e6
    print(f"wrote {args.out}: {len(plain)} tensors, {size_mb:,.1f} MB, from {path}")
