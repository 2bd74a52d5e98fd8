"""Takes a Markdown file's code blocks apart: language, text, commands, and how to test them.

A comment on the line before a fence says so where the text alone does not: ``<!-- test: skip
REASON -->`` leaves a block out, ``<!-- test: args --steps 4 -->`` adds arguments to each of its
commands, ``<!-- test: script 2 -->`` runs Python as a file of its own, by torchrun on two ranks,
``<!-- test: needs MODULE -->`` runs Python where that module is installed.
"""

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from unittest import mock

_SHELLS = ("", "bash", "sh", "shell", "console")
"""A fence without a language holds commands."""
_FENCE = re.compile(r"^(`{3,}|~{3,})\s*(\w*)\s*$")
_MARKER = re.compile(r"^<!--\s*test:\s*(skip|args|script|needs)\b\s*(.*?)\s*-->$")


@dataclass(frozen=True)
class Block:
    line: int
    """Of its fence, counted from 1."""
    language: str
    text: str
    marker: str = ""
    """``skip``, ``args``, ``script``, ``needs`` or nothing."""
    note: str = ""
    """What follows the marker: a reason, arguments, a number of ranks, or a module."""

    @property
    def source(self) -> str:
        """The program; of a diff, what it becomes."""
        if self.language != "diff":
            return self.text
        return "\n".join("" if line[:1] == "-" else line[1:] for line in self.text.splitlines())

    @property
    def kind(self) -> str:
        """``python``, ``shell``, or ``other`` for what is only shown."""
        if self.language in ("python", "py", "diff"):
            return "python"
        return "shell" if self.language in _SHELLS else "other"


def blocks_of(markdown: str) -> list[Block]:
    """Every fenced block, in order; a fence that does not end raises, as a skip without reason."""
    blocks = []
    lines = markdown.splitlines()
    start = 0
    while start < len(lines):
        opening = _FENCE.match(lines[start])
        if opening is None:
            start += 1
            continue
        ends = [i for i in range(start + 1, len(lines)) if lines[i].rstrip() == opening[1]]
        if not ends:
            raise ValueError(f"the block of line {start + 1} does not end")
        marker, note = _marker_before(lines, start)
        if marker == "skip" and not note:
            raise ValueError(f"the block of line {start + 1} is skipped without a reason")
        text = "\n".join(lines[start + 1 : ends[0]])
        blocks.append(Block(start + 1, opening[2], text, marker, note))
        start = ends[0] + 1
    return blocks


def _marker_before(lines: list[str], start: int) -> tuple[str, str]:
    before = [line.strip() for line in lines[:start] if line.strip()]
    found = _MARKER.match(before[-1]) if before else None
    return (found[1], found[2]) if found else ("", "")


def commands_of(block: Block) -> list[str]:
    """A shell block's commands without comments; beside prompts (``$``) other lines are output."""
    text = re.sub(r"\\\n\s*", "", block.text)
    lines = [line.strip() for line in text.splitlines()]
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    commands = [re.sub(r"(^|\s+)#.*$", "", line) for line in lines]
    return [command for command in commands if command]


def unknown_options(module: str, words: Iterable[str]) -> list[str]:
    """Options among the words that are not in the ``--help`` of a module."""
    options = {word.split("=")[0] for word in words if word.startswith("-")}
    return sorted(options - set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", _help_of(module))))


@cache
def _help_of(module: str) -> str:
    """Returns what a module prints for ``--help``, in this process: imports take seconds."""
    with (
        mock.patch.object(sys, "argv", [module, "--help"]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(SystemExit),
    ):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return out.getvalue()
