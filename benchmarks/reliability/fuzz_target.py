"""A kind of file that users give: how good ones are made, damaged, read and then used."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path

__all__ = ["Target"]


class Target(ABC):
    """A kind of file.

    Args:
        folder: Good files of this kind go there; empty.
    """

    def __init__(self, folder: Path) -> None:
        self._seeds = self.seeds(folder)

    @abstractmethod
    def seeds(self, folder: Path) -> list[Path]:
        """Writes good files, or folders, and lists them."""

    @abstractmethod
    def change(self, draw: random.Random, seed: Path, marker: Path) -> tuple[str, bytes]:
        """What is done to a good file, and what it holds then."""

    @abstractmethod
    def use(self, path: Path) -> None:
        """Reads a file and does with it what is done next."""

    def damage(self, draw: random.Random, folder: Path, marker: Path) -> tuple[str, Path]:
        """Writes a damaged file into an empty folder.

        Args:
            draw: Randomness.
            folder: Where.
            marker: What malicious ones make when they run.

        Returns:
            What was done, and the file.
        """
        seed = draw.choice(self._seeds)
        what, content = self.change(draw, seed, marker)
        path = folder / seed.name
        path.write_bytes(content)
        return f"{seed.name}: {what}", path
