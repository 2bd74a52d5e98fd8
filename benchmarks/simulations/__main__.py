"""Steps and bytes over ranks, drawn from what `torchrec-picasso simulate --json` wrote.

    python -m benchmarks.simulations -o docs/simulated.svg

A line of pictures for each file; equal files give an equal picture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from benchmarks.command import SVG_OPTIONS, SVG_STYLE, command_parser
from torchrec_picasso.app.cli.simulate import draw

_RESULTS = Path(__file__).parents[1] / "results"
_FILES = [_RESULTS / f"simulate_{name}.json" for name in ("criteo", "fields_460", "hstu")]


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the files."""
    parser = command_parser("benchmarks.simulations", __doc__)
    parser.add_argument("files", nargs="*", type=Path, default=_FILES, help="default: kept ones")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="picture, .svg")
    args = parser.parse_args(argv)
    for path in args.files:
        if not path.is_file():
            parser.error(f"there is no file {path}")
    kept = [json.loads(path.read_text()) for path in args.files]
    clusters_of = {Path(each["question"]["config"]).stem: each["clusters"] for each in kept}
    with matplotlib.rc_context(SVG_STYLE):
        draw(clusters_of, args.out, **SVG_OPTIONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
