"""One all-to-all for all packs: ids, rows or gradients, with mixed dims in one flat buffer.

Callers keep one matrix per pack, or for ids one vector per pack and chunk, with rows grouped by
rank. The wire requires the opposite nesting: one buffer, grouped by rank and then by matrix. With
one matrix both layouts are the same memory and nothing is copied. With several, segments are joined
before the exchange and split after it, one pass over the exchanged elements each.

Source: TorchRec ``distributed/comm_ops.py`` (sequence all-to-all, its codecs); PICASSO's Shuffle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_picasso._torchrec import QuantizedCommCodec
from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.exchange.waiting import wait_for
from torchrec_picasso.ops.streams import keep_for_current_stream

__all__ = ["PackedAllToAll"]

Counts = Sequence[Sequence[int]]
"""Rows per (pack, rank), on the host."""


class PackedAllToAll:
    """Sends matrix rows to the ranks that they are grouped by; starts at construction.

    Collective: all ranks create the object and wait for it in the same order.

    Args:
        ranks: This rank and its peers.
        inputs_P: One contiguous matrix ``(n_p, D_p)`` per pack, rows grouped by destination rank. A
            vector counts as ``(n_p, 1)``.
        send_PW: Number of rows to each rank; row ``p`` sums to ``n_p``.
        outputs_P: Contiguous tensors for the received rows, ``(m_p, D_p)``, grouped by source rank;
            may be slices of larger matrices.
        receive_PW: Number of rows from each rank; row ``p`` sums to ``m_p``.
        codec: Wire precision, or ``None`` for the precision of the inputs.
    """

    def __init__(
        self,
        ranks: Ranks,
        inputs_P: Sequence[Tensor],
        send_PW: Counts,
        outputs_P: Sequence[Tensor],
        receive_PW: Counts,
        codec: QuantizedCommCodec | None = None,
    ) -> None:
        self._outputs_P = outputs_P
        self._receive_PW = receive_PW
        self._codec = codec
        dims_P = [output.size(1) if output.dim() == 2 else 1 for output in outputs_P]
        send_W = _elements_per_rank(send_PW, dims_P)
        receive_W = _elements_per_rank(receive_PW, dims_P)
        wire_in = _join_by_rank(inputs_P, send_PW)
        # A codec changes the number of elements on the wire, so the splits follow it.
        if codec is not None:
            self._codec_ctx = codec.create_context()
            wire_in = codec.encode(wire_in, self._codec_ctx)
            send_W = [codec.calc_quantized_size(n, self._codec_ctx) for n in send_W]
            receive_W = [codec.calc_quantized_size(n, self._codec_ctx) for n in receive_W]
        # One pack without a codec: receive directly into the output.
        in_place = codec is None and len(outputs_P) == 1
        self._wire_out = outputs_P[0].view(-1) if in_place else wire_in.new_empty(sum(receive_W))
        self._in_place = in_place
        self._wire_in = wire_in  # the work object need not keep its input alive
        self._has_ended = False
        self._work = ranks.start_all_to_all(self._wire_out, wire_in, receive_W, send_W)

    def wait(self) -> Sequence[Tensor]:
        """Finishes the exchange and returns the filled outputs; further calls have no effect."""
        if self._has_ended:
            return self._outputs_P
        wait_for(self._work)
        # A pipeline may have started the exchange on another stream, whose allocator does not know
        # that the current stream uses this memory.
        keep_for_current_stream(self._wire_in)
        if not self._in_place:
            for memory in (self._wire_out, *self._outputs_P):
                keep_for_current_stream(memory)
            received = self._wire_out
            if self._codec is not None:
                received = self._codec.decode(received, self._codec_ctx)
            _cut_by_rank(received, self._outputs_P, self._receive_PW)
        self._has_ended = True
        return self._outputs_P


def _elements_per_rank(counts_PW: Counts, dims_P: Sequence[int]) -> list[int]:
    """Elements to or from each rank: rows times dim, summed over packs."""
    return [
        sum(count * dim for count, dim in zip(counts_P, dims_P)) for counts_P in zip(*counts_PW)
    ]


def _join_by_rank(matrices_P: Sequence[Tensor], counts_PW: Counts) -> Tensor:
    """Joins matrices grouped by rank into one vector grouped by rank, then pack."""
    if len(matrices_P) == 1:
        return matrices_P[0].reshape(-1)
    segments_PW = [matrix.split(list(counts)) for matrix, counts in zip(matrices_P, counts_PW)]
    return torch.cat([segment.reshape(-1) for by_pack in zip(*segments_PW) for segment in by_pack])


def _cut_by_rank(flat: Tensor, matrices_P: Sequence[Tensor], counts_PW: Counts) -> None:
    """Splits a vector grouped by rank, then pack, into matrices grouped by rank."""
    # Segments are views of the output matrices, so the copies below fill these.
    segments_PW = [matrix.split(list(counts)) for matrix, counts in zip(matrices_P, counts_PW)]
    start = 0
    for by_pack in zip(*segments_PW):
        for segment in by_pack:
            end = start + segment.numel()
            segment.copy_(flat[start:end].view_as(segment))
            start = end
