"""Ranks as a list in one process: what they exchange is copied, so a step takes milliseconds.

The test walks the ranks itself, operation by operation. A wait for something that another rank has
not started yet is an error that names both, where real ranks would hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Started:
    """One collective, as far as its ranks have come to it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.on_rank: dict[int, Any] = {}


class FakeRanks:
    """One of some ranks; stands in for ``exchange.all_to_all.Ranks``."""

    row_codec = gradient_codec = None

    def __init__(self, rank: int, size: int, collectives: list[_Started]) -> None:
        self.rank, self.size = rank, size
        self.gradient_divisor = size
        self.num_started = 0
        self.sent_elements = 0
        self._collectives = collectives

    def start_all_to_all(
        self,
        output_m: Tensor,
        input_n: Tensor,
        receive_W: Sequence[int],
        send_W: Sequence[int],
        most_sent: int,
    ) -> _Pending:
        assert sum(receive_W) <= most_sent * len(receive_W), "no bound of what ranks send"
        assert sum(receive_W) == len(output_m)
        assert sum(send_W) == len(input_n)
        self.sent_elements += (sum(send_W) - send_W[self.rank]) * input_n[:1].numel()
        return self._start("all-to-all", (output_m.split(list(receive_W)), input_n, send_W))

    def start_sum(self, values: Tensor) -> _Pending:
        return self._start("sum", (values, values.clone()))

    def _start(self, kind: str, given: Any) -> _Pending:
        if self.num_started == len(self._collectives):
            self._collectives.append(_Started(kind))
        started = self._collectives[self.num_started]
        assert started.kind == kind, f"rank {self.rank} starts {kind}, others {started.kind}"
        started.on_rank[self.rank] = given
        self.num_started += 1
        return _Pending(self, started)


class _Pending:
    def __init__(self, ranks: FakeRanks, started: _Started) -> None:
        self._ranks = ranks
        self._started = started

    def wait(self) -> None:
        rank, on_rank = self._ranks.rank, self._started.on_rank
        for other in range(self._ranks.size):
            assert other in on_rank, (
                f"rank {rank} waits for the {self._started.kind} that rank {other} has not started"
            )
        if self._started.kind == "sum":
            values, _ = on_rank[rank]
            values.copy_(torch.stack([given for _, given in on_rank.values()]).sum(0))
            return
        received_W, *_ = on_rank[rank]
        for other, (_, source, send_W) in on_rank.items():
            received_W[other].copy_(source.split(list(send_W))[rank])


def fake_ranks(size: int) -> list[FakeRanks]:
    collectives: list[_Started] = []
    return [FakeRanks(rank, size, collectives) for rank in range(size)]
