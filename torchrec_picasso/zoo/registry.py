"""Picks the source of samples that a configuration asks for."""

from __future__ import annotations

from torchrec_picasso.config import DataConfig
from torchrec_picasso.zoo.criteo import CriteoSource
from torchrec_picasso.zoo.generated import GeneratedSource
from torchrec_picasso.zoo.source import BatchSource

__all__ = ["make_source", "check_source"]


def make_source(data: DataConfig, seed: int) -> BatchSource:
    """A Criteo file when ``data.path`` names one, generated samples otherwise.

    Args:
        data: Path, batch size and table sizes.
        seed: Seed of the generated samples; a file ignores it.
    """
    return GeneratedSource(data, seed) if data.path is None else CriteoSource(data)


def check_source(source: BatchSource, world_size: int) -> None:
    """Makes one held-out and one training batch, so that bad input ends a run before ranks start.

    Args:
        source: The samples of the run.
        world_size: Ranks that will share a global batch.

    Raises:
        PicassoError: If the file is missing, empty, malformed at its head, or too short.
    """
    for batches in (source.heldout(0, world_size), source.batches(0, world_size)):
        next(iter(batches))
