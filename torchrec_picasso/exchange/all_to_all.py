"""The ranks that tables are sharded over and their collectives; an all-to-all of uneven blocks.

All communication of rows passes through :class:`Ranks`, so the process group and the precision of
rows and gradients on the wire are chosen in one place. Rows and gradients use TorchRec's codecs of
``SEQUENCE_EMBEDDINGS_ALL_TO_ALL``; ids and sums are never encoded.

gloo's own all-to-all posts its sends before its receives. A late rank therefore writes its data
ahead of the notice that it is ready to receive, on the same connection: the link carries one
direction at a time. Messages between pairs of ranks, with receives posted first, use both. Small
exchanges take gloo's all-to-all, which a thread of the process group posts and which costs less CPU
time; the faster the link, the larger they may be (docs/decisions/gloo_messages.md).

Messages between two ranks of one group share a connection and arrive in start order: a small one
waits for every byte started before. All-to-alls and flags therefore have gloo groups of their own.

A gloo thread moves data when its sockets are ready, and preempts the training thread on its core.
If the answer to a message that is just being posted woke it up, the training thread holds the
connection's lock, and the gloo thread retries the lock until its time slice is over. With a lower
priority it waits until the training thread blocks or has used its own slice.

Shape letters: n entries of dim 0 sent, m received, W ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    GroupName,
    _get_default_store,
    _new_process_group_helper,
    _world,
)
from torchrec.distributed.types import CommOp

from torchrec_picasso._torchrec import QuantizedCommCodecs, get_gradient_division
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.waiting import Pending, note_all_reduce, note_bytes

_PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)

_THREAD_NAME = "gloo_tcp_loop"
_NICE = 5
"""A higher value frees more of the core, but leaves the link idle where communication dominates."""
_MOST_NICE = 19

_SMALL_BYTES, _SMALL_S = 1 << 18, 0.016
"""Bound of an exchange that takes gloo's all-to-all: so many bytes, or as many as cross the link in
this time. A rank sends about a quarter of its bound: a row once for its lookups, and none that it
stores."""
_PROBE_BYTES, _PROBES = 1 << 20, 3
"""Bytes of a rank in each exchange that measures the link; the first one waits for late ranks."""

_TAGS = range(1 << 28, (1 << 28) + (1 << 20))
"""Far from the small tags of users' own messages."""


class Ranks:
    """One rank and its peers, with TorchRec's registry of wire precisions.

    Raises CompatError if a precision is not FP32, FP16 or BF16.
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
        """Starts sending ``send_W[w]`` entries of dim 0 to rank ``w``. Collective.

        Both tensors are contiguous and grouped by rank. The output is complete after the handle's
        ``wait``; until then the input must stay alive and unchanged. ``most_sent`` is about the
        most entries that a rank sends, equal on all ranks: by it they choose the same way. Costs
        one collective, or ``W - 1`` messages each way if that may be much and the backend is gloo.
        """
        if self.size == 1:
            output_m.copy_(input_n)
            return _Nothing()
        sent, received = (sum(sizes_W) - sizes_W[self.rank] for sizes_W in (send_W, receive_W))
        entry_bytes = input_n.element_size() * math.prod(input_n.shape[1:])
        note_bytes(sent * entry_bytes, received * entry_bytes)
        pg, sizes = self.pg, (list(receive_W), list(send_W))
        by_gloo = input_n.device.type == "cpu" and is_on_gloo(pg)
        if by_gloo:
            connect(pg)
        if by_gloo and most_sent * entry_bytes > _traffic[pg].small_bytes:
            works = _start_messages(_traffic[pg], output_m, input_n, *sizes)
            return _Exchange(_traffic[pg], works)
        group = _traffic[pg].group if by_gloo else pg
        work: Pending = dist.all_to_all_single(
            output_m, input_n, *sizes, group=group, async_op=True
        )
        return _Exchange(_traffic[pg], [work]) if by_gloo else work

    def start_sum(self, values: Tensor) -> Pending:
        """Starts summing values over ranks, in place. Collective, but of no values nothing is sent.
        A ring sends ``2 (W - 1) / W`` of the values."""
        if self.size == 1 or not values.numel():
            return _Nothing()
        note_all_reduce(values.nbytes, self.size)
        return dist.all_reduce(values, group=self.pg, async_op=True)

    def gather(self, values: Tensor) -> Tensor:
        """Gathers the values, of equal shape, of all ranks: shape ``(W, ...)``. Collective."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values.contiguous(), group=self.pg)
        return torch.stack(gathered)


class _Nothing:
    """An exchange of one rank with itself, which is a copy."""

    def wait(self) -> None:
        pass


class _Traffic:
    """The connections of one process group, and its exchanges in progress, in start order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.small_bytes = _small_bytes(group)  # equal on all ranks
        self.tags = cycle(_TAGS)  # equal on all ranks, and different for exchanges in progress
        self.in_flight: deque[_Exchange] = deque()


def _small_bytes(group: dist.ProcessGroup) -> int:
    """Returns the bound of exchanges that take gloo's all-to-all, measured by such exchanges: the
    fastest of each rank, of these the slowest. Collective."""
    size = group.size()
    if size == 1:
        return _SMALL_BYTES
    sent_Wn = torch.zeros(size, _PROBE_BYTES // size, dtype=torch.uint8, device="cpu")
    received_Wn, times_s = torch.empty_like(sent_Wn), []
    for _ in range(_PROBES):
        start_s = time.perf_counter()
        dist.all_to_all_single(received_Wn, sent_Wn, group=group)
        times_s.append(time.perf_counter() - start_s)
    slowest_s = torch.tensor(min(times_s[1:]), dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX, group=group)
    num_bytes = sent_Wn[0].nbytes * (size - 1)
    return max(_SMALL_BYTES, int(num_bytes * _SMALL_S / float(slowest_s)))


_traffic: WeakKeyDictionary[dist.ProcessGroup, _Traffic] = WeakKeyDictionary()


def connect(pg: dist.ProcessGroup) -> None:
    """Makes the connections of all-to-alls on gloo, before a rank can fail alone. Collective."""
    if pg not in _traffic and is_on_gloo(pg):
        group = pg if pg.size() == 1 else new_gloo_group(pg, torch.device("cpu"), "rows")
        _traffic[pg] = _Traffic(group)


def ranks_of_part(pg: dist.ProcessGroup, ranks: Sequence[int], use: str) -> Ranks:
    """Makes connections of their own for some ranks of ``pg``, this one too. Collective among
    them."""
    group = new_gloo_group(pg, torch.device("cpu"), use, ranks)
    _traffic[group] = _Traffic(group)
    return Ranks(group)


def is_on_gloo(pg: dist.ProcessGroup) -> bool:
    """Whether tensors in host memory travel by gloo."""
    name: str = pg._get_backend(torch.device("cpu")).name()
    return name == "gloo"


class _Exchange:
    """An exchange over gloo, in progress.

    gloo loses track of a pair of ranks when a message is dropped before it is done, a process ends
    badly if a collective was, and TorchRec's pipelines do drop an exchange occasionally. So
    ``_Traffic`` keeps the object alive until it or a later one has been waited for: between two
    ranks, messages arrive in start order.
    """

    def __init__(self, traffic: _Traffic, works: list[Pending]) -> None:
        self._works = works
        self._in_flight = traffic.in_flight
        if works:  # there is something to wait for
            self._in_flight.append(self)

    def wait(self) -> None:
        """Returns when this exchange and all earlier ones are done."""
        while self._works:
            # Exchanges complete in start order, also dropped ones; this releases their memory.
            earliest = self._in_flight[0]
            for work in earliest._works:
                work.wait()
            earliest._works.clear()
            self._in_flight.popleft()


def _start_messages(
    traffic: _Traffic, output_m: Tensor, input_n: Tensor, receive_W: list[int], send_W: list[int]
) -> list[Pending]:
    """Starts a message to and one from every other rank; empty blocks send no message."""
    group, tag = traffic.group, next(traffic.tags)
    rank, world_size = group.rank(), group.size()
    received_W = output_m.split(receive_W)
    sent_W = input_n.split(send_W)
    # Each rank starts with a different peer, so that no link gets all messages at once.
    # Receives are posted in reverse order, which is the order in which peers send to this rank.
    others = [(rank + distance) % world_size for distance in range(1, world_size)]
    sources = [peer for peer in reversed(others) if receive_W[peer]]
    works = [dist.irecv(received_W[p], group=group, group_src=p, tag=tag) for p in sources]
    targets = [peer for peer in others if send_W[peer]]
    works += [dist.isend(sent_W[p], group=group, group_dst=p, tag=tag) for p in targets]
    # The rank's own block needs no message.
    received_W[rank].copy_(sent_W[rank])
    return [work for work in works if work is not None]


def new_gloo_group(
    pg: dist.ProcessGroup, device: torch.device, use: str, ranks: Sequence[int] = ()
) -> dist.ProcessGroup:
    """Makes a gloo group with the ranks of ``pg`` and its timeout on ``device``. Collective.
    ``ranks`` are some of its ranks, by their numbers in the world; none = all.

    Each group of ``pg`` has a ``use`` of its own. torch names a group by the number of groups that
    a rank knows; of overlapping groups ranks know different numbers, and would not meet.
    """
    ranks = list(ranks) or dist.get_process_group_ranks(pg)
    name = GroupName(f"picasso/{use}/{pg.group_name}/{ranks}")
    made = len(ranks), ranks.index(dist.get_rank()), ranks, "gloo", _get_default_store(), name
    group, _ = _new_process_group_helper(*made, timeout=pg._get_backend(device).options._timeout)
    _world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    let_training_go_first()  # the group's threads exist by now
    return group


def let_training_go_first() -> None:
    """Raises the nice value of this process's gloo threads above the calling thread's, where it is
    lower; does nothing on systems without ``/proc``, or without permission."""
    if sys.platform != "linux":
        return
    nice = min(_MOST_NICE, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
    for folder in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended, or permission is missing
            # gloo names its I/O threads; the name is visible in /proc only.
            is_of_gloo = (folder / "comm").read_text().strip() == _THREAD_NAME
            thread = int(folder.name)
            if is_of_gloo and os.getpriority(os.PRIO_PROCESS, thread) < nice:
                os.setpriority(os.PRIO_PROCESS, thread, nice)
