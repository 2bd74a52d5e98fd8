"""Delay kernels at random moments on random streams, to make a missing wait visible.

A stream that should wait for another and does not is mostly right by luck: the other one is done by
then. A delay on it takes the luck away. Two ways of delaying catch different mistakes: before any
operator, which reaches every stream but slows the host, too, so that kernels hardly queue up; and
one long delay per batch, when it is copied, with the host far ahead of the device behind it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.datasets.utils import Batch

_SHARE_OF_OPERATORS = 0.02
_MOST_CYCLES = 8_000_000  # about 4 ms of a GPU's clock
_CYCLES_PER_BATCH = 40_000_000  # about 20 ms: longer than the host needs for a step


def streams_of(pipeline: object) -> list[torch.cuda.Stream]:
    """The side streams of a TorchRec pipeline; none on the CPU or of another kind of pipeline."""
    names = ("_memcpy_stream", "_data_dist_stream")
    return [s for name in names if (s := getattr(pipeline, name, None)) is not None]


class RandomDelays(TorchDispatchMode):
    """Delays the current stream or a side stream before some operators; nothing on the CPU.

    Args:
        streams: Side streams.
        seed: Seed of the moments, streams and lengths.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream], seed: int) -> None:
        super().__init__()
        self._streams = streams
        self._random = random.Random(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Delays perhaps, then runs ``func``."""
        if self._streams and self._random.random() < _SHARE_OF_OPERATORS:
            _delay(self._random, self._streams, _MOST_CYCLES)
        return func(*args, **(kwargs or {}))


def delayed_batches(
    batches: Iterable[Batch], streams: Sequence[torch.cuda.Stream], seed: int
) -> Iterator[Batch]:
    """The batches, a long delay queued before each is handed out; TorchRec's pipelines ask for it
    on the stream that copies."""
    chance = random.Random(seed)
    for batch in batches:
        if streams:
            torch.cuda._sleep(_CYCLES_PER_BATCH)
            _delay(chance, streams, _CYCLES_PER_BATCH)
        yield batch


def _delay(chance: random.Random, streams: Sequence[torch.cuda.Stream], most_cycles: int) -> None:
    current = torch.cuda.current_stream()
    with torch.cuda.stream(chance.choice([current, *streams])):
        torch.cuda._sleep(chance.randrange(1, most_cycles))
