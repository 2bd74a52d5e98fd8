"""Sums the gradients of hot rows over ranks, for touched rows only.

The header already reports to every rank which hot rows any rank touched, so the all-reduce carries
only those: never more bytes than a reduction of the whole hot set. Untouched rows are not in the
sum, hence not updated, whatever the optimizer's decay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.exchange.waiting import wait_for

__all__ = ["HotReduction"]


class HotReduction:
    """Sums gradients of hot rows over all ranks; starts at construction.

    Collective: all ranks create the object and wait for it in the same order. Costs an all-reduce
    of the outputs, none when they are empty, and one copy with several packs.

    Args:
        ranks: This rank and its peers.
        grads_P: Gradients of the hot rows that this rank touched, ``(h_p, D_p)``.
        positions_P: Position of each of these rows among the rows that any rank touched.
        outputs_P: Contiguous tensors for the sums, ``(t_p, D_p)``; the shapes, and afterwards the
            values, are equal on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        grads_P: Sequence[Tensor],
        positions_P: Sequence[Tensor],
        outputs_P: Sequence[Tensor],
    ) -> None:
        self._outputs_P = outputs_P
        # Scatter (h, D) into (t, D): rows that only other ranks touched contribute zero.
        for output, positions, grads in zip(outputs_P, positions_P, grads_P):
            output.zero_()
            output[positions] = grads
        # One all-reduce for all packs; with one pack the output itself is the buffer.
        if len(outputs_P) == 1:
            self._flat = outputs_P[0].view(-1)
        else:
            self._flat = torch.cat([output.reshape(-1) for output in outputs_P])
        self._work = ranks.start_sum(self._flat) if self._flat.numel() else None

    def wait(self) -> Sequence[Tensor]:
        """Finishes the sum and returns the filled outputs; further calls have no effect."""
        if self._work is not None:
            wait_for(self._work)
            self._work = None
            if len(self._outputs_P) > 1:
                parts = self._flat.split([output.numel() for output in self._outputs_P])
                for output, part in zip(self._outputs_P, parts):
                    output.copy_(part.view_as(output))
        return self._outputs_P
