"""SHA-256 sums of a checkpoint's files, by which those that are not what was written are found.

They are in the format of coreutils: ``sha256sum -c SHA256SUMS`` in the folder checks them as well.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["damages", "sums_of_rank", "write_sums"]

_NAME = "SHA256SUMS"
_PIECE_BYTES = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")


def sums_of_rank(folder: Path, rank: int) -> dict[str, str]:
    """Sums of the files that a rank wrote, by name; what no rank wrote alone is rank 0's.

    Args:
        folder: Of the checkpoint, with all its files.
        rank: This rank.

    Raises:
        OSError: If a file cannot be read.
    """
    return {path.name: _sum(path) for path in _files(folder) if _writer_of(path.name) == rank}


def _writer_of(name: str) -> int:
    """The rank that torch's writer names a file after."""
    found = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return int(found[1]) if found else 0


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes the sums of all ranks. One rank calls this."""
    with (folder / _NAME).open("w", encoding="utf-8") as file:
        file.writelines(f"{sums[name]}  {name}\n" for name in sorted(sums))
        file.flush()
        os.fsync(file.fileno())


def damages(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint; nothing if it has no sums.

    Args:
        folder: A whole checkpoint.
        share: Which part of the files to look at.
        shares: Parts that there are.

    Returns:
        A phrase for each damaged file.
    """
    listed = folder / _NAME
    if not listed.exists():
        return []
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return [f"{_NAME} cannot be read"]
    matches = [_LINE.fullmatch(line) for line in lines]
    if not matches or None in matches:
        return [f"{_NAME} is damaged"]
    sums = {match[2]: match[1] for match in matches if match}
    names = sorted(sums.keys() | {path.name for path in _files(folder)})
    return [
        f"{name} {wrong}"
        for name in names[share::shares]
        if (wrong := _wrong(folder / name, sums.get(name)))
    ]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.is_file() and path.name != _NAME)


def _wrong(path: Path, expected: str | None) -> str | None:
    if expected is None:
        return "has no sum"
    if not path.is_file():
        return "is missing"
    try:
        return None if _sum(path) == expected else "is not what was written"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _sum(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()
