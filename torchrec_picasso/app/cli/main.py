"""``torchrec-picasso``: parses the command line and prints errors as one message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from torchrec_picasso.app.cli.arguments import make_parser
from torchrec_picasso.app.cli.command import check_arguments
from torchrec_picasso.app.launch.environment import KEEPS_FREED_MEMORY
from torchrec_picasso.app.launch.torchrun import under_torchrun
from torchrec_picasso.compat import FBGEMM_OF_TORCH, SUPPORTED_TORCH
from torchrec_picasso.errors import PeerError, PicassoError
from torchrec_picasso.version import __version__

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130
_PACKAGES = {"yaml": "pyyaml", "tqdm": "tqdm", "matplotlib": "matplotlib"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand with the given arguments, ``None`` = those of this process.

    Returns:
        Exit code: 0, 2 for unusable input, 1 for another failure of a rank.
    """
    try:
        try:
            args = make_parser(__version__).parse_args(argv)
            _set_variables_of_ranks()
            return _run(args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as with `| head`; without dup2 Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return _say("interrupted", _EXIT_INTERRUPTED)


def _set_variables_of_ranks() -> None:
    """Sets, unless they are set, the variables that spawned ranks inherit."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not under_torchrun():  # its ranks run already
        for name, value in KEEPS_FREED_MEMORY.items():
            os.environ.setdefault(name, value)


def _run(args: argparse.Namespace) -> int:
    if (problem := _why_incomplete()) is not None:
        return _say(problem, EXIT_FAILED)
    if (problem := _why_unusable(args)) is not None:
        return _say(problem, EXIT_BAD_INPUT)
    # here, not above: PyTorch and TorchRec take seconds to import
    from torchrec_picasso.app.launch.quiet import quiet_upstream
    from torchrec_picasso.app.launch.run_ranks import RankError

    quiet_upstream()
    try:
        return import_module(f"torchrec_picasso.app.cli.{args.command}").run(args) or 0
    except ModuleNotFoundError as error:
        return _say(_why_not_found(error), EXIT_BAD_INPUT)
    except PeerError as error:
        return _say(str(error), EXIT_FAILED)
    except PicassoError as error:
        return _say(str(error), EXIT_BAD_INPUT)
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, PicassoError) and not isinstance(cause, PeerError):
            return _say(str(cause), EXIT_BAD_INPUT)
        return _say(str(error), EXIT_FAILED)


def _why_unusable(args: argparse.Namespace) -> str | None:
    """Returns what is wrong with numbers, files or a configuration, before PyTorch is imported."""
    try:
        check_arguments(args)
    except PicassoError as error:
        return str(error)
    except ModuleNotFoundError as error:
        return _why_not_found(error)
    return None


def _why_not_found(error: ModuleNotFoundError) -> str:
    """Names the package of the command line that is missing; raises the error of another one."""
    if error.name not in _PACKAGES:
        raise error
    return (
        f"the package {_PACKAGES[error.name]} is not installed; "
        "pip install 'torchrec_picasso[app]' has all packages of the command line"
    )


def _why_incomplete() -> str | None:
    """Names the packages that are missing, and versions that load together; imports nothing."""
    missing = [name for name in ("torch", "torchrec", "fbgemm_gpu") if find_spec(name) is None]
    if not missing:
        return None
    sets = "; ".join(
        f"torch {torch} with torchrec and fbgemm-gpu (or fbgemm-gpu-cpu) {FBGEMM_OF_TORCH[torch]}"
        for torch in SUPPORTED_TORCH
    )
    return f"not installed: {', '.join(missing)}. Versions that load together: {sets}"


def _say(message: str, exit_code: int) -> int:
    print(f"torchrec-picasso: error: {message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
