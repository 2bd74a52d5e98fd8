"""SHA-256 checksums of a checkpoint's files, in the format of ``sha256sum -c SHA256SUMS``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchrec_picasso.app.checkpoints.folder import write_synced

_NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")


def sums_of_rank(folder: Path, rank: int) -> dict[str, str]:
    """Checksums by name of the files that a rank wrote; shared files belong to rank 0.

    Args:
        folder: Folder of the checkpoint, with all files.
        rank: The rank.

    Raises:
        OSError: If a file cannot be read.
    """
    return {path.name: _sum(path) for path in _files(folder) if _writer_of(path.name) == rank}


def _writer_of(name: str) -> int:
    """The rank in a file name of torch's writer; 0 for other files."""
    found = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return int(found[1]) if found else 0


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes the checksums of all ranks. One rank calls this."""
    content = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()
    write_synced(folder / _NAME, lambda file: file.write(content))


def damages(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """Checks the files of a complete checkpoint; a checkpoint without checksums passes.

    Args:
        folder: A complete checkpoint.
        share: Index of the part of the files to check.
        shares: Number of parts.

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
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()
