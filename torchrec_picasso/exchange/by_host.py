"""Exchanges between ranks that ask and home ranks, in two parts by host.

Of Y hosts with L ranks, rank ``y L + l`` has *place* l on host y. By host, what goes to home ranks
first goes *inside* the host, to the rank that has the home rank's place, the *relay*, and then
*across* hosts, among the ranks of one place; what comes from home ranks takes the same way back. A
rank then has L - 1 + Y - 1 peers instead of Y L - 1. At the relay rows that several ranks of its
host asked for become one, and one becomes several.

The second part needs what the first one brings. On the way to home ranks, whose first part stays in
the host, it starts when a later exchange starts or is waited for; on the way back, whose first part
needs the network, when the exchange or a later one is waited for. Second parts start in the order
of their first parts. Each direction has groups of its own inside and across, so the order of
messages in a group is equal on all ranks, also where ranks wait in another order.

By host, a sum over all ranks has three parts: each rank sums a piece of the values over its host,
then over hosts, and gives it to its host. A host sends ``2 (Y - 1) / Y`` of the values to others,
in a ring of all ranks ``2 (W - 1) / W``. Each part has a fixed order of summands. The maximum of
flags is that of hosts' maxima.

Shape letters: L places, W ranks, X words, Y hosts; n values of a piece.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso._torchrec import QuantizedCommCodec
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import Agreement, Flags
from torchrec_picasso.exchange.all_to_all import Ranks, is_on_gloo, ranks_of_part
from torchrec_picasso.exchange.packed import Exchanges, PackedAllToAll, Payload, Relayed
from torchrec_picasso.exchange.waiting import Pending, wait_for

_USE_ROWS = "use form='rows'"


class HostExchanges(Exchanges):
    """Exchanges by host; :func:`connect_hosts` made their groups. Payloads of the first part are
    grouped by the ranks that take part in it. There are no codecs."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._parts = _parts[ranks.pg]
        self.num_hosts, self.num_places = self._parts.num_hosts, self._parts.num_places
        self.inside, self.across = self._parts.ranks_to_homes
        """The ranks of this host, and those of this rank's place."""

    def send_words(self, words_WX: Tensor) -> tuple[Pending, Tensor]:
        """Starts sending the words for each rank, ``(W, X)``. Collective.

        The returned memory, ``(2 W, X)``, will contain the words of each rank, then those that this
        rank relays, by place of the sender on this host and host of the receiver.
        """
        size, (num_hosts, num_places) = len(words_WX), (self.num_hosts, self.num_places)
        received = words_WX.new_empty(2 * size, words_WX.size(1))
        arrived, passing = received.split(size)

        def swapped(words: Tensor, first: int, second: int) -> Tensor:
            return words.view(first, second, -1).transpose(0, 1).reshape(size, -1)

        def relayed() -> list[Payload]:
            by_host, each = swapped(passing, num_places, num_hosts), [num_places] * num_hosts
            return [Payload(by_host, each, arrived, each)]

        # from rank order (host, place) to (place, host): the relay of a home rank has its place
        by_place, each = swapped(words_WX, num_hosts, num_places), [num_hosts] * num_places
        payload = Payload(by_place, each, passing, each)
        return self.start([payload], relayed, size, to_homes=True), received

    def start(
        self,
        payloads: Sequence[Payload],
        relayed: Relayed,
        most_asked: int,
        codec: QuantizedCommCodec | None = None,
        *,
        to_homes: bool,
    ) -> Pending:
        """Starts the first part. Collective; ``relayed`` returns the payloads of the second."""
        assert codec is None, "two parts would round twice"
        parts = self._parts
        _start_all(parts.to_homes)
        first, second = parts.ranks_to_homes if to_homes else parts.ranks_from_homes
        exchange = PackedAllToAll(first, payloads, most_asked)

        @torch.no_grad()
        def start_second() -> Pending:
            exchange.wait()
            return PackedAllToAll(second, relayed(), most_asked)

        return _InTwoParts(parts, start_second, to_homes)

    def start_sum(self, values: Tensor) -> Pending:
        """Starts summing values, ``(n,)``, over ranks, in place. Collective; all ranks wait for
        sums in one order."""
        parts, num_places = self._parts, self.num_places
        _start_all(parts.to_homes)
        inside, across = parts.ranks_to_homes
        # a piece for each place, the longer ones first
        lengths_L = [len(piece) for piece in values.tensor_split(num_places)]
        own_L = [lengths_L[inside.rank]] * num_places
        pieces_Ln = values.new_empty(num_places, own_L[0])
        payload = Payload(values, lengths_L, pieces_Ln.view(-1), own_L)
        exchange = PackedAllToAll(inside, [payload], values.numel())

        @torch.no_grad()
        def start_second() -> Pending:
            exchange.wait()
            total_n, *others = pieces_Ln.unbind()
            for other_n in others:  # by place: float sums depend on the order
                total_n.add_(other_n)
            return _Then(across.start_sum(total_n), partial(start_third, total_n))

        def start_third(total_n: Tensor) -> Pending:
            sent = Payload(total_n.repeat(num_places), own_L, values, lengths_L)
            return PackedAllToAll(parts.ranks_of_sums, [sent], values.numel())

        return _InTwoParts(parts, start_second, to_homes=True)


class FlagsAgreement:
    """Tells every rank the maximum of each flag over all ranks; starts at construction.

    Collective, as :class:`.Agreement`: an all-to-all; by host, where :func:`connect_hosts` was
    called, one inside and one across, with groups of their own. ``device`` is that of ``pg``.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, own: Flags) -> None:
        parts = _parts.get(pg)
        inside, across = (each.pg for each in parts.ranks_to_homes) if parts else (pg, pg)
        self._last = first = Agreement(inside, device, own)

        def start_across() -> Pending:
            self._last = Agreement(across, device, Flags.largest(first.wait()))
            return self._last

        self._pending = _InTwoParts(parts, start_across, to_homes=True) if parts else first

    def wait(self) -> Flags:
        """Returns the maxima; equal on all ranks."""
        self._pending.wait()
        return Flags.largest(self._last.wait())


class _Then:
    """An operation in progress, and another one that starts once the first is waited for."""

    def __init__(self, first: Pending, start: Callable[[], Pending]) -> None:
        self._first = first
        self._start: Callable[[], Pending] | None = start

    def wait(self) -> None:
        """Finishes both; further calls have no effect."""
        if self._start is not None:
            start, self._start = self._start, None
            wait_for(self._first)
            start().wait()


class _InTwoParts:
    """An exchange of two parts, in progress. The queue of its direction keeps it until its second
    part starts, also if it is dropped, so that ranks start the same parts."""

    def __init__(self, parts: _Parts, start: Callable[[], Pending], to_homes: bool) -> None:
        self._parts = parts
        self._start: Callable[[], Pending] | None = start
        self._queue = parts.to_homes if to_homes else parts.from_homes
        self._queue.append(self)
        self._second: Pending | None = None

    def start_second(self) -> None:
        """Waits for the first part, then starts the second one."""
        assert self._start is not None, "it has left the queue"
        self._second, self._start = self._start(), None

    def wait(self) -> None:
        """Finishes the exchange; further calls have no effect."""
        _start_all(self._parts.to_homes)
        while self._second is None:
            self._queue.popleft().start_second()
        self._second.wait()


def _start_all(queue: deque[_InTwoParts]) -> None:
    """Starts the second parts of all exchanges in a queue."""
    while queue:
        queue.popleft().start_second()


class _Parts:
    """The groups of one process group's exchanges by host, and the exchanges whose second part has
    not started, in start order. Collective."""

    def __init__(self, pg: dist.ProcessGroup, num_places: int) -> None:
        self.num_places, self.num_hosts = num_places, pg.size() // num_places
        host, place = divmod(pg.rank(), num_places)
        every = dist.get_process_group_ranks(pg)
        inside = every[host * num_places : (host + 1) * num_places]
        across = every[place::num_places]
        # all ranks make their groups in this order
        to_inside, to_across, from_across, from_inside, self.ranks_of_sums = (
            ranks_of_part(pg, ranks, use)
            for ranks, use in [
                (inside, "to relays"),
                (across, "from relays to homes"),
                (across, "from homes to relays"),
                (inside, "from relays"),
                (inside, "sums"),
            ]
        )
        self.ranks_to_homes = to_inside, to_across
        self.ranks_from_homes = from_across, from_inside
        """Ranks of the first and of the second part of exchanges; the last part of sums, inside,
        has :attr:`ranks_of_sums`."""
        self.to_homes: deque[_InTwoParts] = deque()
        self.from_homes: deque[_InTwoParts] = deque()


_parts: WeakKeyDictionary[dist.ProcessGroup, _Parts] = WeakKeyDictionary()


def connect_hosts(pg: dist.ProcessGroup, device: torch.device | None) -> None:
    """Makes the groups of exchanges by host, before a rank can fail alone. Collective.

    ``LOCAL_WORLD_SIZE`` and ``LOCAL_RANK``, as torchrun sets them, say which ranks share a host.
    Raises CompatError on all ranks if exchanges by host do not apply to these ranks.
    """
    if pg in _parts:
        return
    if device is None or device.type != "cpu" or not is_on_gloo(pg):
        raise CompatError(
            f"form='node_rows' was given for tables on {device}; it is built and tested for the "
            f"CPU with gloo: {_USE_ROWS}"
        )
    by_rank = Agreement(pg, device, launched_place()).wait()
    if (reason := why_no_hosts(by_rank)) is not None:
        raise CompatError(f"form='node_rows' was given, but {reason}: {_USE_ROWS}")
    _parts[pg] = _Parts(pg, by_rank[0][0])


def launched_place() -> list[int]:
    """Returns what the launcher says of this rank: ranks of its host, number on it; -1 = nothing
    said."""
    values = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    return [int(value) if value.isdecimal() else -1 for value in values]


def why_no_hosts(by_rank: Sequence[Sequence[int]]) -> str | None:
    """Returns the reason why ranks cannot exchange by host, from ranks of the host and number on
    it, by rank; ``None`` = they can."""
    sizes, size = sorted({num for num, _ in by_rank}), len(by_rank)
    if sizes[0] < 1:
        return "LOCAL_WORLD_SIZE is not set on all ranks, as torchrun does"
    if len(sizes) > 1:
        return f"hosts have {' or '.join(map(str, sizes))} ranks; expected as many on each host"
    num_places = sizes[0]
    if num_places == 1:
        return "each host has one rank"
    if num_places == size:
        return "all ranks are on one host"
    places = [place for _, place in by_rank]
    if size % num_places or places != [*range(num_places)] * (size // num_places):
        return f"ranks are not numbered host by host, {num_places} on each"
    return None
