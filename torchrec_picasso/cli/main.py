"""``torchrec-picasso``: parses the command line and turns errors into one clear message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torchrec_picasso.cli import calibrate, convert, demo, models, plan, quality, stats, train
from torchrec_picasso.errors import PeerError, PicassoError
from torchrec_picasso.launch.quiet import quiet_upstream
from torchrec_picasso.launch.run_ranks import RankError
from torchrec_picasso.version import __version__

__all__ = ["main"]

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Arguments without the program's name; ``None`` = those of this process.

    Returns:
        The exit code: 0, 2 for input that cannot be used, 1 for a rank that failed otherwise.
    """
    parser = argparse.ArgumentParser(
        prog="torchrec-picasso",
        description="Hot/cold embedding rows and packed exchanges for TorchRec.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (demo, models, stats, calibrate, plan, train, convert, quality):
        module.add_parser(subcommands)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by ranks; each rank is one worker
    quiet_upstream()
    try:
        args.run(args)
    except PeerError as error:
        return _say(str(error), EXIT_FAILED)
    except PicassoError as error:
        return _say(str(error), EXIT_BAD_INPUT)
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, PicassoError) and not isinstance(cause, PeerError):
            return _say(str(cause), EXIT_BAD_INPUT)
        return _say(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _say("interrupted", _EXIT_INTERRUPTED)
    return 0


def _say(message: str, exit_code: int) -> int:
    print(f"torchrec-picasso: error: {message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
