"""The step header: one small all-to-all before any row moves.

Each rank tells every other rank, in one message of fixed length, what must be known before rows can
move: the words of its routes, whether its own input is invalid, and whether it still has data. All
ranks learn of invalid input and of the end of data together, so all raise together and no rank is
left waiting.

The header costs one collective of 8 bytes per word, 3 words beside those of the routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.exchange.packed import Exchanges

NUM_OWN_WORDS = 3
"""Outside ids, bad weights, and the state: the flags below, then ``most_asked``."""
_HAS_DATA, _BAD_LENGTHS, _LOOKS_UP_NOTHING, _STATES = 1, 2, 4, 8


@dataclass(frozen=True)
class RouteWords:
    """The words of one route, int64, on the device."""

    sent: Sequence[Tensor]
    """Words to each rank, shape ``(W, X_i)``, in pieces whose shapes are equal on all ranks."""
    host_numbers: Sequence[Tensor] = ()
    """Numbers, shape ``(n,)``, that are copied to this rank's host and not sent."""


ReceivedWords = tuple[list[np.ndarray], list[np.ndarray]]
"""The words of one route on the host, in the pieces of :class:`RouteWords`: those of each rank,
``(W, X_i)``, and its host numbers. By host, words that this rank relays follow: ``(2 W, X_i)``."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The information of all ranks about one batch, on the host, as in :class:`HeaderExchange`."""

    routes: Sequence[ReceivedWords]
    outside_ids_W: list[int]
    bad_weights_W: list[int]
    bad_lengths_W: list[bool]
    any_data: bool
    """Whether any rank's batch contains data, rather than a placeholder after the data's end."""
    any_looks_up_nothing: bool
    """Whether any rank's batch has no lookup."""
    most_asked: int
    """A bound of the rows that any rank's batch asks for, equal on all ranks."""


@dataclass(eq=False, kw_only=True)
class HeaderExchange:
    """Exchanges the headers of a batch; starts at construction. Collective: all ranks create the
    object and wait for it in the same order. The fields are what this rank tells the others."""

    exchanges: Exchanges
    routes: Sequence[RouteWords]
    outside_ids: Tensor
    """Number of lookups outside their table, 0-d int64, on the device."""
    bad_weights: Tensor
    """Number of weights that are not finite, 0-d int64, on the device."""
    bad_lengths: Tensor | bool
    """Whether lengths do not fit the values, or ids are no integers; 0-d bool, or known on the
    host."""
    has_data: bool
    """Whether this rank's batch comes from its data, even if it has no samples."""
    looks_up_nothing: bool
    """Whether this rank's batch has no lookup; such a batch may have no samples."""
    most_asked: int
    """A bound of the rows, or of the bags, that this rank's batch asks for."""

    def __post_init__(self) -> None:
        self._pieces = [words for route in self.routes for words in route.sent]
        self.sent_WX = self._message()
        """The message to each rank, own words before those of routes, int64."""
        self._work, self._received = self.exchanges.send_words(self.sent_WX)

    def _message(self) -> Tensor:
        state = _HAS_DATA * self.has_data + _LOOKS_UP_NOTHING * self.looks_up_nothing
        state += _STATES * self.most_asked
        state_word = torch.full_like(self.outside_ids, state)
        # bad_lengths may be a device tensor; its bit is then added without a host sync.
        if isinstance(self.bad_lengths, Tensor):
            state_word = state_word.add(self.bad_lengths, alpha=_BAD_LENGTHS)
        elif self.bad_lengths:
            state_word += _BAD_LENGTHS
        # The same for all ranks, (W, 1) or (W, X_i), beside the routes' (W, X_i).
        size = len(self._pieces[0])
        own = [word.expand(size, 1) for word in (self.outside_ids, self.bad_weights, state_word)]
        return torch.cat([*own, *self._pieces], dim=1).contiguous()

    def wait(self) -> Header:
        """Finishes the exchange and copies the header to the host (one sync on CUDA)."""
        self._work.wait()
        own_numbers = [each for route in self.routes for each in route.host_numbers]
        # One concatenation, so that a single copy syncs the host.
        host = torch.cat([*own_numbers, self._received.view(-1)]).cpu().numpy()
        # In this order: these numbers, then of each rank its own words and its routes'.
        *numbers, words = _cut(host, [part.numel() for part in own_numbers])
        widths = [NUM_OWN_WORDS, *(piece.size(1) for piece in self._pieces)]
        own, *pieces, _ = _cut(words.reshape(self._received.shape), widths)
        # words that this rank only relays follow those for it
        outside_ids_W, bad_weights_W, states_W = own[: len(self.sent_WX)].T.tolist()
        sent, by_route = iter(pieces), iter(numbers)
        return Header(
            routes=[
                ([*islice(sent, len(route.sent))], [*islice(by_route, len(route.host_numbers))])
                for route in self.routes
            ],
            outside_ids_W=outside_ids_W,
            bad_weights_W=bad_weights_W,
            bad_lengths_W=[bool(state & _BAD_LENGTHS) for state in states_W],
            any_data=any(state & _HAS_DATA for state in states_W),
            any_looks_up_nothing=any(state & _LOOKS_UP_NOTHING for state in states_W),
            most_asked=max(states_W) // _STATES,
        )


def _cut(numbers: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Cuts the last dimension into consecutive pieces of the given sizes, and the rest."""
    return np.split(numbers, [*accumulate(sizes)], axis=-1)
