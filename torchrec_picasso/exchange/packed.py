"""One collective for all packs: all-to-all of row numbers, rows, gradients; sum of hot gradients.

Callers keep one matrix per pack, grouped by rank, or one vector of row numbers per pack, grouped by
chunk and rank. The wire requires the opposite nesting: one buffer, grouped by rank, then by matrix
and chunk. With one matrix of one chunk both layouts are the same memory and nothing is copied.
Otherwise segments are joined before the exchange and split after it, one pass over the exchanged
elements each.

Shape letters: D dim; n rows sent, m received; h hot rows of this rank, t of any rank; P packs; W
ranks, in a payload of several chunks ranks by chunk; X words.

Source: TorchRec ``distributed/comm_ops.py`` (sequence all-to-all, its codecs); PICASSO's Shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_picasso._torchrec import QuantizedCommCodec
from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.exchange.waiting import Pending, wait_for
from torchrec_picasso.ops.row_order import ExchangeSplits
from torchrec_picasso.ops.streams import keep_for_current_stream


class Payload(NamedTuple):
    """The share of one pack in an all-to-all, of one chunk or of several. All payloads of an
    exchange have one type and device. The received tensor may be a slice of a larger matrix."""

    sent: Tensor
    """Contiguous ``(n, D)``, or ``(n,)`` which counts as ``(n, 1)``, by chunk and destination."""
    sent_W: Sequence[int]
    """Rows to each rank, chunk after chunk, which sum to n."""
    received: Tensor
    """Contiguous memory for ``(m, D)``, or ``(m,)``, by chunk and source rank."""
    received_W: Sequence[int]
    """Rows from each rank, chunk after chunk, which sum to m."""


def with_all_chunks(
    sent_P: Sequence[Tensor],
    sent_by_P: Sequence[ExchangeSplits],
    received_P: Sequence[Tensor],
    received_by_P: Sequence[ExchangeSplits],
) -> list[Payload]:
    """Returns a payload of each pack."""
    packs = zip(sent_P, sent_by_P, received_P, received_by_P)
    return [Payload(sent, by.by_rank, into, into_by.by_rank) for sent, by, into, into_by in packs]


class PackedAllToAll:
    """Sends the rows of all payloads to the ranks that they are grouped by; starts at construction.

    Collective: all ranks create the object and wait for it in the same order. ``most_asked``
    is the most rows that one rank asks for: equal on all ranks, so that all choose the same way to
    send, and no bound of what a home rank sends. Without a codec the wire has the precision of the
    payloads.
    """

    def __init__(
        self,
        ranks: Ranks,
        payloads: Sequence[Payload],
        most_asked: int,
        codec: QuantizedCommCodec | None = None,
    ) -> None:
        sent_P, sent_PW, received_P, received_PW = zip(*payloads)
        self._received_P: Sequence[Tensor] = received_P
        self._received_PW: _Counts = received_PW
        self._codec = codec
        self._size = size = ranks.size
        # One chunk of one payload without a codec: send and receive its memory as it is.
        self._in_place = codec is None and len(payloads) == 1 and len(sent_PW[0]) == size
        if self._in_place:
            (wire_in, send_W, self._wire_out, receive_W), most_sent = payloads[0], most_asked
        else:
            dims_P = [received.size(1) if received.dim() == 2 else 1 for received in received_P]
            send_W = _elements_per_rank(sent_PW, dims_P, size)
            receive_W = _elements_per_rank(received_PW, dims_P, size)
            wire_in, most_sent = _join_by_rank(sent_P, sent_PW, size), most_asked * max(dims_P)
        # A codec changes the number of elements on the wire, so the splits follow it.
        if codec is not None:
            self._codec_ctx = codec.create_context()
            wire_in = codec.encode(wire_in, self._codec_ctx)
            send_W = [codec.calc_quantized_size(n, self._codec_ctx) for n in send_W]
            receive_W = [codec.calc_quantized_size(n, self._codec_ctx) for n in receive_W]
        if not self._in_place:
            self._wire_out = wire_in.new_empty(sum(receive_W))
        self._wire_in = wire_in  # the work object need not keep its input alive
        self._has_ended = False
        self._work = ranks.start_all_to_all(self._wire_out, wire_in, receive_W, send_W, most_sent)

    def wait(self) -> None:
        """Finishes the exchange and fills the payloads' memory; further calls have no effect."""
        if self._has_ended:
            return
        wait_for(self._work)
        # A pipeline may have started the exchange on another stream, whose allocator does not know
        # that the current stream uses this memory.
        keep_for_current_stream(self._wire_in)
        if not self._in_place:
            for memory in (self._wire_out, *self._received_P):
                keep_for_current_stream(memory)
            received = self._wire_out
            if self._codec is not None:
                received = self._codec.decode(received, self._codec_ctx)
            _cut_by_rank(received, self._received_P, self._received_PW, self._size)
        self._has_ended = True


Relayed = Callable[[], Sequence[Payload]]
"""Returns the payloads of the second part, once those of the first have arrived at the relay."""


class Exchanges:
    """Exchanges in which each rank sends to every other one; ``by_host.py`` has those by host."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def send_words(self, words_WX: Tensor) -> tuple[Pending, Tensor]:
        """Starts sending the words for each rank, ``(W, X)``. Collective. The returned memory,
        ``(W, X)``, will contain the words of each rank."""
        received_WX, each = torch.empty_like(words_WX), [1] * len(words_WX)
        payload = Payload(words_WX, each, received_WX, each)
        return PackedAllToAll(self._ranks, [payload], len(words_WX)), received_WX

    def start_sum(self, values: Tensor) -> Pending:
        """Starts summing values, ``(n,)``, over ranks, in place. Collective; all ranks wait for
        sums in one order."""
        return self._ranks.start_sum(values)

    def start(
        self,
        payloads: Sequence[Payload],
        relayed: Relayed,
        most_asked: int,
        codec: QuantizedCommCodec | None = None,
        *,
        to_homes: bool,
    ) -> Pending:
        """Starts an exchange, to home ranks or back, as :class:`.PackedAllToAll`. Collective.
        ``relayed`` is called by exchanges of two parts."""
        return PackedAllToAll(self._ranks, payloads, most_asked, codec)


class HotReduction:
    """Sums gradients of hot rows over all ranks; starts at construction.

    Header and row numbers told every rank which hot rows any rank touched, so the all-reduce
    carries only those: never more bytes than a reduction of the whole hot set. Untouched rows are
    not in the sum, hence not updated, whatever the optimizer's decay.

    Collective: all ranks create the object and wait for it in the same order. Costs an all-reduce
    of the outputs, none when they are empty, and a copy with several packs.

    Args:
        start_sum: Starts summing a vector over all ranks, in place.
        grads_P: Gradients of the hot rows that this rank touched, ``(h_p, D_p)``.
        positions_P: Position of each of these rows among those that any rank touched, int64,
            ``(h_p,)``.
        outputs_P: Contiguous tensors for the sums, ``(t_p, D_p)``; the shapes, and afterwards the
            values, are equal on all ranks.
    """

    def __init__(
        self,
        start_sum: Callable[[Tensor], Pending],
        grads_P: Sequence[Tensor],
        positions_P: Sequence[Tensor],
        outputs_P: Sequence[Tensor],
    ) -> None:
        self._outputs_P = outputs_P
        # One all-reduce for all packs; with one pack the output itself is the buffer.
        sizes_P = [output.numel() for output in outputs_P]
        first, *others = outputs_P
        self._flat = first.new_zeros(sum(sizes_P)) if others else first.view(-1).zero_()
        # Scatter (h, D) into (t, D): rows that only other ranks touched contribute zero.
        for sums, output, positions, grads in zip(
            self._flat.split(sizes_P), outputs_P, positions_P, grads_P
        ):
            sums.view_as(output)[positions] = grads
        self._work: Pending | None = start_sum(self._flat)

    def wait(self) -> None:
        """Finishes the sum and fills the outputs; further calls have no effect."""
        if self._work is not None:
            wait_for(self._work)
            self._work = None
            if len(self._outputs_P) > 1:
                _cut_by_rank(self._flat, self._outputs_P, [[len(o)] for o in self._outputs_P], 1)


_Counts = Sequence[Sequence[int]]
"""Rows of each payload by chunk and rank, on the host."""


def _elements_per_rank(counts_PW: _Counts, dims_P: Sequence[int], size: int) -> list[int]:
    """Elements to or from each rank: rows times dim, summed over packs and chunks."""
    pairs = list(zip(counts_PW, dims_P))
    return [sum(sum(nums[rank::size]) * dim for nums, dim in pairs) for rank in range(size)]


def _join_by_rank(matrices_P: Sequence[Tensor], counts_PW: _Counts, size: int) -> Tensor:
    """Joins matrices grouped by chunk and rank into a vector grouped by rank, pack and chunk."""
    if len(matrices_P) == 1 and len(counts_PW[0]) == size:
        return matrices_P[0].flatten()
    segments = _segments(matrices_P, counts_PW, size)
    if len({matrix.shape[1:] for matrix in matrices_P}) == 1:  # rows of one dim: flat afterwards
        return torch.cat(segments).flatten()
    return torch.cat([segment.flatten() for segment in segments])


def _cut_by_rank(flat: Tensor, matrices_P: Sequence[Tensor], counts_PW: _Counts, size: int) -> None:
    """Splits such a vector into the matrices again."""
    segments = _segments(matrices_P, counts_PW, size)
    if len({matrix.shape[1:] for matrix in matrices_P}) == 1:
        whole = flat if segments[0].dim() == 1 else flat.view(-1, *segments[0].shape[1:])
        rows = whole.split([len(segment) for segment in segments])
    else:
        pieces = flat.split([segment.numel() for segment in segments])
        rows = tuple(piece.view_as(segment) for piece, segment in zip(pieces, segments))
    torch._foreach_copy_(segments, rows)


def _segments(matrices_P: Sequence[Tensor], counts_PW: _Counts, size: int) -> list[Tensor]:
    """Returns views of matrices grouped by chunk and rank, in the order of the wire."""
    segments_PW = [matrix.split(list(counts)) for matrix, counts in zip(matrices_P, counts_PW)]
    return [each for rank in range(size) for own in segments_PW for each in own[rank::size]]
