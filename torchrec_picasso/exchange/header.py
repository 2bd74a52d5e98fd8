"""The step header: one small all-to-all before any row moves.

One fixed-length message per pair of ranks carries everything that must be known before rows can
move: the number of ids from each rank, the hot rows that any rank touches, whether any rank's input
is invalid, and whether any rank still has data. All ranks learn of invalid input and of the end of
data together, so all raise together and no rank is left waiting.

The header costs one collective of ``8 * (P K + 3) + H / 8`` bytes per pair and the step's only
planned host sync; A owner-pooled packs add ``8 * (K + A)`` bytes.

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
    """The information about a batch that one rank contributes to the header, on the device."""

    counts_PQ: Tensor
    """Unique rows by pack: hot, then cold by chunk and home rank; int64, ``(P, 1 + K W)``."""
    lookups_J: Tensor
    """Lookups of each run of bags, int64, ``(J,)``; copied to this rank's host, not sent."""
    touched_H: Tensor
    """Whether this rank's batch uses a hot slot, bool, shape ``(H,)``."""
    hot_start_P1: Sequence[int]
    """First hot slot of each pack; the last entry is H."""
    outside_ids: Tensor
    """Number of lookups outside their table, 0-d integer."""
    bad_weights: Tensor
    """Number of weights that are not finite, 0-d integer."""
    bad_lengths: Tensor | bool = False
    """Whether lengths do not sum to the number of values; 0-d bool, or known on the host."""
    has_data: bool = True
    """Whether this rank's batch comes from its data, even if it has no samples."""
    looks_up_nothing: bool = False
    """Whether this rank's batch has no lookup; such a batch may have no samples."""
    bag_words_WX: Tensor | None = None
    """Words for the home rank of owner-pooled bags, int64; ``None`` = no owner-pooled tables."""

    def to_send(self, world_size: int) -> Tensor:
        """Builds the message to each rank.

        Args:
            world_size: Number of ranks, W.

        Returns:
            Messages, int64, shape ``(W, X)``.
        """
        state = _HAS_DATA * self.has_data + _LOOKS_UP_NOTHING * self.looks_up_nothing
        state_word = torch.full_like(self.outside_ids, state)
        # bad_lengths may be a device tensor; its bit is then added without a host sync.
        if isinstance(self.bad_lengths, Tensor):
            state_word = state_word + _BAD_LENGTHS * self.bad_lengths
        elif self.bad_lengths:
            state_word += _BAD_LENGTHS
        flags_3 = torch.stack([self.outside_ids, self.bad_weights, state_word])
        same_for_all = torch.cat([flags_3.to(torch.int64), _pack_bits(self.touched_H)])
        # Message to rank w: counts for w (P K words, (P K, W) transposed), words of bags for w,
        # then 3 flag words and H / 64 words of touched slots, which are equal for all ranks.
        words = [self.counts_PQ[:, 1:].reshape(-1, world_size).t()]
        if self.bag_words_WX is not None:
            words.append(self.bag_words_WX.to(same_for_all.device, non_blocking=True))
        return torch.cat([*words, same_for_all.expand(world_size, -1)], dim=1).contiguous()


@dataclass(frozen=True, kw_only=True)
class Header:
    """The information of all ranks about one batch, on the host."""

    hot_P: list[int]
    """Hot rows that this rank's batch uses, by pack."""
    mine_PKW: list[list[list[int]]]
    """Outgoing requests: cold rows that this rank requests, by pack, chunk and home rank."""
    asked_PKW: list[list[list[int]]]
    """Incoming requests: cold rows requested from this rank, by pack, chunk and requesting rank."""
    lookups_J: list[int]
    """Lookups of this rank's batch by run, now on the host."""
    outside_ids_W: list[int]
    """Number of lookups outside their table, by rank."""
    bad_weights_W: list[int]
    """Number of per-sample weights that are not finite, by rank."""
    bad_lengths_W: list[bool]
    """Whether lengths do not sum to the number of values, by rank."""
    any_data: bool
    """Whether any rank's batch contains data, rather than a placeholder after the data's end."""
    any_looks_up_nothing: bool
    """Whether any rank's batch has no lookup."""
    touched_P: list[Tensor]
    """Hot slots that any rank touches, ascending, by pack, counted from 0 in it, on the device."""
    bag_words_WX: list[list[int]]
    """Words of each rank about the bags requested here; empty without owner-pooled tables."""


class HeaderExchange:
    """Exchanges the headers of a batch; starts at construction.

    Collective: all ranks create the object and wait for it in the same order.

    Args:
        ranks: This rank and its peers.
        words: Words of this rank's batch.
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
        """Finishes the exchange and copies the header to the host (one sync on CUDA)."""
        wait_for(self._work)
        counts_PQ, lookups_J = self._words.counts_PQ, self._words.lookups_J
        edges = list(accumulate([counts_PQ.numel(), lookups_J.numel()]))
        # One concatenation, so that a single copy syncs the host.
        host = torch.cat([counts_PQ.reshape(-1), lookups_J, self._received_WX.view(-1)]).cpu()
        counts, lookups, received = np.split(host.numpy(), edges)
        world_size, num_packs = self._world_size, counts_PQ.size(0)
        own_PQ = counts.reshape(counts_PQ.shape)
        num_chunks = (own_PQ.shape[1] - 1) // world_size
        mine_PKW = own_PQ[:, 1:].reshape(num_packs, num_chunks, world_size)
        bag_words_WX = self._words.bag_words_WX
        num_words = [num_packs * num_chunks, 0 if bag_words_WX is None else bag_words_WX.size(1), 3]
        # Each received message has X words: P K counts, words of bags, 3 flags, touched bits.
        counts_WX, bags_WX, flags_W3, bits_WX = np.split(
            received.reshape(world_size, -1), list(accumulate(num_words)), axis=1
        )
        outside_ids_W, bad_weights_W, states_W = flags_W3.T.tolist()
        return Header(
            hot_P=own_PQ[:, 0].tolist(),
            mine_PKW=mine_PKW.tolist(),
            # From (W, P K) by sender to (P, K, W).
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
        """Returns the touched hot slots of each pack, from all ranks' words on the host."""
        starts_P1 = np.array(self._words.hot_start_P1)
        touched_t = _union_of_bits(bits_WX)
        # touched_t ascends over all packs: find each pack's range, then count slots from 0 in the
        # pack.
        edges_P1 = np.searchsorted(touched_t, starts_P1).tolist()
        touched_t -= np.repeat(starts_P1[:-1], np.diff(edges_P1))
        on_device = torch.from_numpy(touched_t).to(self._sent_WX.device, non_blocking=True)
        return [on_device[first:end] for first, end in pairwise(edges_P1)]


def _pack_bits(mask_H: Tensor) -> Tensor:
    """Packs a bool mask into int64 words of 64 bits each, little-endian."""
    num_words = -(-mask_H.numel() // (8 * _WORD_BYTES))
    # Padded to whole words as (bytes, 8 bits); a byte is the sum of its bits' place values.
    padded = mask_H.new_zeros(num_words * _WORD_BYTES, 8)
    padded.view(-1)[: mask_H.numel()] = mask_H
    place_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=mask_H.device)
    return (padded * place_8).sum(1, dtype=torch.uint8).view(torch.int64)


def _union_of_bits(words_WX: np.ndarray) -> np.ndarray:
    """Returns the positions set in any rank's words, ascending."""
    union_X = np.bitwise_or.reduce(words_WX, axis=0)
    return np.unpackbits(union_X.view(np.uint8), bitorder="little").nonzero()[0]
