"""The step header: one small all-to-all before any row moves.

One fixed-length message per pair of ranks carries everything that must be known before rows can
move: how many ids come from whom, which hot rows anybody touches, whether anybody's input is bad,
and whether anybody still has data. Because all ranks learn of bad input and of the end together,
all raise together and nobody is left waiting.

It costs one collective of ``8 * (P K + 3) + H / 8`` bytes per pair and the step's only planned host
sync; with A packs whose bags travel, ``8 * (K + A)`` bytes more.

Shape letters: A packs of bags, P packs of rows, K chunks, J runs of bags, W ranks, H hot slots, X
words of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.exchange.waiting import wait_for

__all__ = ["Header", "HeaderExchange", "HeaderWords"]

_WORD_BYTES = 8
_HAS_DATA, _BAD_LENGTHS, _LOOKS_UP_NOTHING = 1, 2, 4  # bits of one word: a flag costs no byte


@dataclass(frozen=True, kw_only=True)
class HeaderWords:
    """What one rank says of a batch, on the device."""

    counts_PQ: Tensor
    """Unique rows of each pack: hot, then cold by chunk and home; int64, ``(P, 1 + K W)``."""
    lookups_J: Tensor
    """Lookups of each run of bags, which only this rank asks for on its host, int64, ``(J,)``."""
    touched_H: Tensor
    """Which hot slots this rank's batch uses, bool, shape ``(H,)``."""
    hot_start_P1: Sequence[int]
    """First hot slot of each pack, and H."""
    outside_ids: Tensor
    """Number of lookups outside their table, 0-d integer."""
    bad_weights: Tensor
    """Number of weights that are not finite, 0-d integer."""
    bad_lengths: Tensor | bool = False
    """Whether lengths do not sum to the number of values; 0-d bool, or known on the host."""
    has_data: bool = True
    """Whether this rank's batch comes from its data, even one of no samples."""
    looks_up_nothing: bool = False
    """Whether this rank's batch has no lookup; then it may have no sample."""
    bag_words_WX: Tensor | None = None
    """What each rank must know of the bags that it pools, int64; ``None`` = there are none."""

    def to_send(self, world_size: int) -> Tensor:
        """The message to each rank, int64, shape ``(W, X)``."""
        state = _HAS_DATA * self.has_data + _LOOKS_UP_NOTHING * self.looks_up_nothing
        state_word = torch.full_like(self.outside_ids, state)
        if isinstance(self.bad_lengths, Tensor):
            state_word = state_word + _BAD_LENGTHS * self.bad_lengths
        elif self.bad_lengths:
            state_word += _BAD_LENGTHS
        flags_3 = torch.stack([self.outside_ids, self.bad_weights, state_word])
        same_for_all = torch.cat([flags_3.to(torch.int64), _pack_bits(self.touched_H)])
        words = [self.counts_PQ[:, 1:].reshape(-1, world_size).t()]
        if self.bag_words_WX is not None:
            words.append(self.bag_words_WX.to(same_for_all.device, non_blocking=True))
        return torch.cat([*words, same_for_all.expand(world_size, -1)], dim=1).contiguous()


@dataclass(frozen=True, kw_only=True)
class Header:
    """What all ranks know of one batch before its rows move, on the host."""

    hot_P: list[int]
    """Hot rows that this rank's batch uses, per pack."""
    mine_PKW: list[list[list[int]]]
    """Cold rows that this rank asks of each home, per pack and chunk."""
    asked_PKW: list[list[list[int]]]
    """Cold rows that each rank asks of this home, per pack and chunk."""
    lookups_J: list[int]
    """Lookups of this rank's batch, as they were given, on the host now."""
    outside_ids_W: list[int]
    """Lookups outside their table on each rank."""
    bad_weights_W: list[int]
    """Per-sample weights that are not finite on each rank."""
    bad_lengths_W: list[bool]
    """Whether lengths do not sum to the number of values, on each rank."""
    any_data: bool
    """Whether any rank's batch is more than a stand-in for data that has ended."""
    any_looks_up_nothing: bool
    """Whether any rank's batch has no lookup."""
    touched_P: list[Tensor]
    """Hot slots that any rank touches, counted from 0 in each pack, ascending, on the device."""
    bag_words_WX: list[list[int]]
    """What each rank says of the bags that it asks for here; empty where there are none."""


class HeaderExchange:
    """Exchanges the headers of a batch; starts at construction.

    Collective: every one of the ranks makes and waits for it in the same order.

    Args:
        ranks: Who exchanges.
        words: Of this rank's batch.
    """

    def __init__(self, ranks: Ranks, words: HeaderWords) -> None:
        self._words = words
        self._world_size = ranks.size
        self._sent_WX = words.to_send(ranks.size)
        self._received_WX = torch.empty_like(self._sent_WX)
        words_W = [self._sent_WX.size(1)] * ranks.size
        self._work = ranks.start_all_to_all(
            self._received_WX.view(-1), self._sent_WX.view(-1), words_W, words_W
        )

    def wait(self) -> Header:
        """Finishes the exchange and brings it to the host (one sync on CUDA)."""
        wait_for(self._work)
        counts_PQ, lookups_J = self._words.counts_PQ, self._words.lookups_J
        edges = list(accumulate([counts_PQ.numel(), lookups_J.numel()]))
        host = torch.cat([counts_PQ.reshape(-1), lookups_J, self._received_WX.view(-1)]).cpu()
        counts, lookups, received = np.split(host.numpy(), edges)
        world_size, num_packs = self._world_size, counts_PQ.size(0)
        own_PQ = counts.reshape(counts_PQ.shape)
        num_chunks = (own_PQ.shape[1] - 1) // world_size
        mine_PKW = own_PQ[:, 1:].reshape(num_packs, num_chunks, world_size)
        of_bags = self._words.bag_words_WX
        num_words = [num_packs * num_chunks, 0 if of_bags is None else of_bags.size(1), 3]
        counts_WX, bags_WX, flags_W3, bits_WX = np.split(
            received.reshape(world_size, -1), list(accumulate(num_words)), axis=1
        )
        outside_ids_W, bad_weights_W, states_W = flags_W3.T.tolist()
        return Header(
            hot_P=own_PQ[:, 0].tolist(),
            mine_PKW=mine_PKW.tolist(),
            asked_PKW=counts_WX.T.reshape(mine_PKW.shape).tolist(),
            lookups_J=lookups.tolist(),
            outside_ids_W=outside_ids_W,
            bad_weights_W=bad_weights_W,
            bad_lengths_W=[bool(state & _BAD_LENGTHS) for state in states_W],
            any_data=any(state & _HAS_DATA for state in states_W),
            any_looks_up_nothing=any(state & _LOOKS_UP_NOTHING for state in states_W),
            touched_P=self._touched_slots(bits_WX),
            bag_words_WX=bags_WX.tolist(),
        )

    def _touched_slots(self, bits_WX: np.ndarray) -> list[Tensor]:
        """Touched hot slots of each pack, from all ranks' words on the host."""
        starts_P1 = np.array(self._words.hot_start_P1)
        touched_t = _union_of_bits(bits_WX)
        edges_P1 = np.searchsorted(touched_t, starts_P1).tolist()
        touched_t -= np.repeat(starts_P1[:-1], np.diff(edges_P1))
        on_device = torch.from_numpy(touched_t).to(self._sent_WX.device, non_blocking=True)
        return [on_device[first:end] for first, end in pairwise(edges_P1)]


def _pack_bits(mask_H: Tensor) -> Tensor:
    """Packs a bool mask into int64 words, 64 bits each, little end first."""
    num_words = -(-mask_H.numel() // (8 * _WORD_BYTES))
    padded = mask_H.new_zeros(num_words * _WORD_BYTES, 8)
    padded.view(-1)[: mask_H.numel()] = mask_H
    place_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=mask_H.device)
    return (padded * place_8).sum(1, dtype=torch.uint8).view(torch.int64)


def _union_of_bits(words_WX: np.ndarray) -> np.ndarray:
    """Positions set in any rank's words, ascending."""
    union_X = np.bitwise_or.reduce(words_WX, axis=0)
    return np.unpackbits(union_X.view(np.uint8), bitorder="little").nonzero()[0]
