"""The ranks that tables are sharded over: rank number, world size and the collectives.

All communication passes through this class, so the process group and the precision of rows and
gradients on the wire are chosen in one place. Rows and gradients use TorchRec's codecs of
``SEQUENCE_EMBEDDINGS_ALL_TO_ALL``; ids and sums are never encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import CommOp

from torchrec_picasso._torchrec import (
    QuantizedCommCodecs,
    get_gradient_division,
)
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.all_to_all import start_all_to_all
from torchrec_picasso.exchange.waiting import Pending, note_all_reduce

_PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)


class Ranks:
    """One rank and its peers, with TorchRec's registry of wire precisions.

    Raises:
        CompatError: If a precision is not FP32, FP16 or BF16.
    """

    def __init__(
        self, pg: dist.ProcessGroup, codecs: Mapping[str, QuantizedCommCodecs] | None = None
    ) -> None:
        self.pg = pg
        self.rank, self.size = pg.rank(), pg.size()
        row_codecs = (codecs or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        self.row_codec = row_codecs.forward if row_codecs else None
        """Wire precision of rows; ``None`` = float32, without a codec."""
        self.gradient_codec = row_codecs.backward if row_codecs else None
        """Wire precision of gradients; ``None`` = float32, without a codec."""
        for precision in self.wire:
            if precision not in _PRECISIONS:
                raise CompatError(
                    f"the wire precision {precision} of SEQUENCE_EMBEDDINGS_ALL_TO_ALL is not "
                    "supported for hot/cold tables; use CommType.FP32, FP16 or BF16"
                )

    @property
    def wire(self) -> tuple[torch.dtype, torch.dtype]:
        """Wire precision of rows, and of gradients."""
        codecs = self.row_codec, self.gradient_codec
        rows, gradients = (c.quantized_dtype if c else torch.float32 for c in codecs)
        return rows, gradients

    @property
    def gradient_divisor(self) -> int:
        """Divisor of gradient sums over ranks: TorchRec trains with their mean."""
        return self.size if get_gradient_division() else 1

    def start_all_to_all(
        self,
        output_m: Tensor,
        input_n: Tensor,
        receive_W: Sequence[int],
        send_W: Sequence[int],
        most_sent: int,
    ) -> Pending:
        """Starts sending each rank its block, as :func:`start_all_to_all`. Collective."""
        return start_all_to_all(self.pg, output_m, input_n, receive_W, send_W, most_sent)

    def start_sum(self, values: Tensor) -> Pending:
        """Starts summing values over ranks, in place. Collective.

        A ring sends ``2 (W - 1) / W`` of the values.
        """
        note_all_reduce(values.nbytes, self.size)
        work: Pending = dist.all_reduce(values, group=self.pg, async_op=True)
        return work

    def gather(self, values: Tensor) -> Tensor:
        """Gathers the values, of equal shape, of all ranks: shape ``(W, ...)``. Collective."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values.contiguous(), group=self.pg)
        return torch.stack(gathered)
