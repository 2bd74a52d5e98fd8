"""A subcommand with its arguments, and the checks of what is given for them.

This file imports neither PyTorch nor TorchRec, so wrong arguments answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torchrec_picasso.app.cli.outputs import check_outputs
from torchrec_picasso.app.launch.torchrun import under_torchrun
from torchrec_picasso.errors import ConfigError

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_LARGEST = 10**18  # bytes and seeds stay finite integers


@dataclass(frozen=True)
class Range:
    """The numbers that an argument may be, and their words."""

    words: str
    holds: Callable[[float], bool]


def at_least(least: float, words: str = "") -> Range:
    """Numbers from ``least`` on; ``words`` follow it in the error."""
    return Range(f"at least {least:g}{words}", lambda number: least <= number <= _LARGEST)


def more_than_zero(unit: str = "") -> Range:
    """Numbers above 0, in a unit."""
    return Range(f"more than 0{unit}", lambda number: 0 < number <= _LARGEST)


def multiple_of(divisor: int) -> Range:
    """Multiples of a number, above 0."""
    return Range(f"a multiple of {divisor}", lambda number: number > 0 and number % divisor == 0)


def up_to(most: int, least: int = 0) -> Range:
    """Numbers from ``least`` to ``most``, both included."""
    return Range(f"{least} to {most:,}", lambda number: least <= number <= most)


def check_arguments(args: argparse.Namespace) -> None:
    """Checks numbers, files and options that need others by ``ranges``, ``inputs``, ``folders``,
    ``outputs``, ``needs`` and ``needs_torchrun``, then all by ``check``; removes these from
    ``args``.

    Raises:
        PicassoError: If a number is out of its range, a file to read does not exist, a folder is a
            file, a file cannot be written, an option lacks one that it needs, a command needs
            torchrun, or its ``check`` refuses the input.
    """
    check = vars(args).pop("check")
    for name in vars(args).pop("inputs"):
        given = getattr(args, name)
        for path in given if isinstance(given, list) else [given]:
            if path is not None and not Path(path).exists():
                raise ConfigError(f"{_flag_of(name)} {path}: no such file")
    for name in vars(args).pop("folders"):
        if Path(getattr(args, name)).is_file():
            raise ConfigError(f"{_flag_of(name)} {getattr(args, name)}: is a file; name a folder")
    check_outputs(args, *vars(args).pop("outputs"))
    for name, allowed in vars(args).pop("ranges").items():
        given = getattr(args, name)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and not allowed.holds(number):
                most = f" and at most {_LARGEST:g}" if number > _LARGEST else ""
                found = f"{allowed.words}{most}, got {number:.10g}"
                raise ConfigError(f"{_flag_of(name)}: expected {found}")
    for name, (other, words) in vars(args).pop("needs").items():
        if getattr(args, name) and not getattr(args, other):
            raise ConfigError(f"{_flag_of(name)}: needs {words}")
    for name, words in vars(args).pop("needs_torchrun").items():
        if getattr(args, name) is not None and not under_torchrun():
            flag = f"{_flag_of(name)} " if name != "command" else ""
            raise ConfigError(f"{flag}{getattr(args, name)}: {words}")
    check(args)


def _flag_of(name: str) -> str:
    return "FILES:" if name == "files" else "--" + name.replace("_", "-")


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


class Command:
    """A subcommand; each example is a line of its arguments. ``check`` refuses their values."""

    def __init__(
        self,
        subcommands: Subcommands,
        name: str,
        help: str,
        description: str,
        *examples: str,
        check: Callable[[argparse.Namespace], None] = lambda args: None,
    ) -> None:
        lines = (f"  {example}" for example in examples)
        self.parser = subcommands.add_parser(
            name,
            help=help,
            description=description,
            epilog="\n".join(("example:", *lines)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._ranges: dict[str, Range] = {}
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._folders: list[str] = []
        self._needs: dict[str, tuple[str, str]] = {}
        self._needs_torchrun: dict[str, str] = {}
        files = {"inputs": self._inputs, "folders": self._folders, "outputs": self._outputs}
        needs = {"needs": self._needs, "needs_torchrun": self._needs_torchrun}
        self.parser.set_defaults(check=check, ranges=self._ranges, **needs, **files)

    def text(self, flag: str, metavar: str, help: str, default: str | None = None) -> None:
        """Adds an option that is any text."""
        self.parser.add_argument(flag, metavar=metavar, default=default, help=help)

    def out(self, help: str) -> None:
        """Adds ``--out``, a file to write."""
        self.parser.add_argument("-o", "--out", required=True, metavar="FILE", help=help)
        self._outputs.append("out")

    def reads(self, *names: str) -> None:
        """Marks arguments as files to read."""
        self._inputs += names

    def folder(self, flag: str, help: str, default: str) -> None:
        """Adds a folder to write into."""
        self.text(flag, "DIR", help, default)
        self._folders.append(_name_of(flag))

    def file(self, flag: str, help: str) -> None:
        """Adds a file to write."""
        self.text(flag, "FILE", help)
        self._outputs.append(_name_of(flag))

    def config(self, help: str = "YAML configuration") -> None:
        """Adds ``--config``."""
        self.parser.add_argument("--config", required=True, metavar="FILE", help=help)

    def integer(self, flag: str, allowed: Range, help: str, default: int | None = None) -> None:
        """Adds an integer."""
        self.parser.add_argument(flag, type=int, metavar="N", default=default, help=help)
        self.limit(flag, allowed)

    def rank_order(self) -> None:
        """Adds ``--rank-order``."""
        self.text(
            "--rank-order",
            "FILE",
            "number torchrun's ranks in the order of hosts that `torchrec-picasso order` wrote",
        )
        self.needs_torchrun(
            "rank_order",
            "ranks on one machine have no order of hosts; start with torchrun on several hosts",
        )

    def number(
        self, flag: str, metavar: str, allowed: Range, help: str, default: float | None = None
    ) -> None:
        """Adds a number."""
        self.parser.add_argument(flag, type=float, metavar=metavar, default=default, help=help)
        self.limit(flag, allowed)

    def limit(self, flag: str, allowed: Range) -> None:
        """Bounds an option's numbers."""
        self._ranges[_name_of(flag)] = allowed

    def needs(self, name: str, other: str, words: str) -> None:
        """Lets an argument need another one, which ``words`` describe."""
        self._needs[name] = other, words

    def needs_torchrun(self, name: str, words: str) -> None:
        """Lets an argument, or the command, need torchrun; ``words`` are the reason."""
        self._needs_torchrun[name] = words
