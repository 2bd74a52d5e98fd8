"""Summing hot rows' gradients over ranks, touched rows only.

The header already told every rank which hot rows anybody touched, so the all-reduce carries just
those: never more bytes than reducing the whole hot set, and equal to it when all are touched.
Untouched rows are not in the sum, hence not updated, whatever the optimizer's decay.
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

    Collective: every one of the ranks makes and waits for it in the same order.

    Args:
        ranks: Who sums.
        grads_P: Gradients of the hot rows this rank touched, per pack, ``(h_p, D_p)``.
        positions_P: Their places among the rows that any rank touched, ``(h_p,)``.
        outputs_P: Where the sums go, per pack, ``(t_p, D_p)`` contiguous; the same shapes on all
            ranks. Every rank gets the same bits.

    Cost:
        An all-reduce of the outputs; none when they are empty. One copy with several packs.
    """

    def __init__(
        self,
        ranks: Ranks,
        grads_P: Sequence[Tensor],
        positions_P: Sequence[Tensor],
        outputs_P: Sequence[Tensor],
    ) -> None:
        self._outputs_P = outputs_P
        for output, positions, grads in zip(outputs_P, positions_P, grads_P):
            output.zero_()
            output[positions] = grads
        if len(outputs_P) == 1:
            self._flat = outputs_P[0].view(-1)
        else:
            self._flat = torch.cat([output.reshape(-1) for output in outputs_P])
        self._work = ranks.start_sum(self._flat) if self._flat.numel() else None

    def wait(self) -> Sequence[Tensor]:
        """Finishes the sum; once is enough, and more does nothing.

        Returns:
            The outputs given at construction, filled.
        """
        if self._work is not None:
            wait_for(self._work)
            self._work = None
            if len(self._outputs_P) > 1:
                parts = self._flat.split([output.numel() for output in self._outputs_P])
                for output, part in zip(self._outputs_P, parts):
                    output.copy_(part.view_as(output))
        return self._outputs_P
