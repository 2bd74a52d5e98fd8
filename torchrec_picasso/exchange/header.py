"""The header of a step: the one small exchange that every rank's host reads.

An all-to-all of a few integers per pair of ranks carries everything that must be known before rows
can move: how many ids come from whom, which hot rows anybody touches, whether anybody's input is
bad, whether anybody's homes were written from outside (a checkpoint was loaded) and whether anybody
still has data. Because all ranks learn of bad input and of the end together, all raise together and
nobody is left waiting.

It costs one collective of ``8 * (P + 3) + H / 8`` bytes per pair and the step's only planned host
sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.exchange.all_to_all import start_all_to_all
from torchrec_picasso.exchange.waiting import wait_for

__all__ = ["HeaderExchange", "StepHeader"]

_WORD_BYTES = 8
_HOMES_WRITTEN, _HAS_DATA = 1, 2  # bits of one word, so that a flag costs no byte


@dataclass(frozen=True)
class StepHeader:
    """What all ranks know of one batch before its rows move, on the host."""

    hot_P: list[int]
    """Hot rows that this rank's batch uses, per pack."""
    send_PW: list[list[int]]
    """Cold rows asked of each home, per pack."""
    receive_PW: list[list[int]]
    """Cold rows that each rank asks of this home, per pack."""
    lookups_M: list[int]
    """Lookups of this rank's batch, as they were given, on the host now."""
    outside_ids_W: list[int]
    """Lookups outside their table on each rank."""
    bad_weights_W: list[int]
    """Per-sample weights that are not finite on each rank, where that is checked."""
    homes_written: bool
    """Whether any rank's homes were written from outside since its replicas were filled."""
    any_data: bool
    """Whether any rank's batch is more than a stand-in for data that has ended."""
    touched_slots_T: Tensor
    """Hot slots that any rank touches, ascending, int64, on the device."""
    touched_P: list[int]
    """How many of them belong to each pack."""

    @property
    def rows_per_pack(self) -> list[int]:
        """Unique rows of this rank's batch in each pack: hot ones and cold ones."""
        return [hot + sum(send_W) for hot, send_W in zip(self.hot_P, self.send_PW)]


class HeaderExchange:
    """Exchanges the headers of a batch; starts at construction.

    Collective: every rank of ``pg`` makes and waits for it in the same order.

    Args:
        pg: Process group of W ranks.
        counts_PB: Unique rows per pack: hot, home 0, ..., home W-1; int64, shape ``(P, 1 + W)``.
        lookups_M: Lookups that only this rank asks for on its host, int64, shape ``(M,)``.
        touched_H: Which hot slots this rank's batch uses, bool, shape ``(H,)``.
        hot_start_P1: First hot slot of each pack, and H.
        outside_ids: Number of lookups outside their table, 0-d integer tensor.
        bad_weights: Number of weights that are not finite, 0-d integer tensor.
        homes_written: Whether this rank's homes were written from outside.
        has_data: Whether this rank's batch comes from its data, even one of no samples.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        *,
        counts_PB: Tensor,
        lookups_M: Tensor,
        touched_H: Tensor,
        hot_start_P1: Sequence[int],
        outside_ids: Tensor,
        bad_weights: Tensor,
        homes_written: bool,
        has_data: bool = True,
    ) -> None:
        self._num_packs, width = counts_PB.shape
        self._world_size = width - 1
        self._hot_start_P1 = hot_start_P1
        self._local = torch.cat([counts_PB.reshape(-1), lookups_M])
        state = _HOMES_WRITTEN * homes_written + _HAS_DATA * has_data
        flags_3 = torch.stack([outside_ids, bad_weights, torch.full_like(outside_ids, state)])
        same_for_all = torch.cat([flags_3.to(torch.int64), _pack_bits(touched_H)])
        sent_WX = torch.cat(
            [counts_PB[:, 1:].t(), same_for_all.expand(self._world_size, -1)], dim=1
        ).contiguous()
        self._sent_WX = sent_WX
        self._received_WX = torch.empty_like(sent_WX)
        words_W = [sent_WX.size(1)] * self._world_size
        self._work = start_all_to_all(
            pg, self._received_WX.view(-1), sent_WX.view(-1), words_W, words_W
        )

    def wait(self) -> StepHeader:
        """Finishes the exchange and brings it to the host (one sync on CUDA)."""
        wait_for(self._work)
        num_packs, world_size = self._num_packs, self._world_size
        host = torch.cat([self._local, self._received_WX.reshape(-1)]).cpu()
        local, received = host.split([self._local.numel(), self._received_WX.numel()])
        num_counts = num_packs * (1 + world_size)
        counts_PB, lookups_M = local[:num_counts].view(num_packs, -1), local[num_counts:]
        received_WX = received.view(world_size, -1)
        flags_W3 = received_WX[:, num_packs : num_packs + 3]
        touched_T = _union_of_bits(received_WX[:, num_packs + 3 :])
        starts = torch.searchsorted(touched_T, torch.tensor(self._hot_start_P1)).tolist()
        return StepHeader(
            hot_P=counts_PB[:, 0].tolist(),
            send_PW=counts_PB[:, 1:].tolist(),
            receive_PW=received_WX[:, :num_packs].t().tolist(),
            lookups_M=lookups_M.tolist(),
            outside_ids_W=flags_W3[:, 0].tolist(),
            bad_weights_W=flags_W3[:, 1].tolist(),
            homes_written=bool((flags_W3[:, 2] & _HOMES_WRITTEN).any()),
            any_data=bool((flags_W3[:, 2] & _HAS_DATA).any()),
            touched_slots_T=touched_T.to(self._sent_WX.device, non_blocking=True),
            touched_P=[end - start for start, end in pairwise(starts)],
        )


def _pack_bits(mask_H: Tensor) -> Tensor:
    """Packs a bool mask into int64 words, 64 bits each, little end first."""
    num_words = -(-mask_H.numel() // (8 * _WORD_BYTES))
    padded = mask_H.new_zeros(num_words * _WORD_BYTES, 8)
    padded.view(-1)[: mask_H.numel()] = mask_H
    place_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=mask_H.device)
    return (padded * place_8).sum(1, dtype=torch.uint8).view(torch.int64)


def _union_of_bits(words_WX: Tensor) -> Tensor:
    """Positions set in any rank's words, ascending, on the host."""
    union_X = words_WX[0].clone()
    for words_X in words_WX[1:]:
        union_X |= words_X
    shift_8 = torch.arange(8, dtype=torch.uint8)
    bits = (union_X.contiguous().view(torch.uint8).unsqueeze(1) >> shift_8) & 1
    return bits.view(-1).nonzero().squeeze(1)
