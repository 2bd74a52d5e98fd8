"""Ranks of one start agree on a part of a store, whatever earlier starts left in it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from torchrec_picasso.app.launch.fresh_store import fresh_store

WORLD_SIZE = 3


def start(path: Path, ranks: range = range(WORLD_SIZE), timeout_s: float = 30) -> list[object]:
    """Starts ranks as threads: how many each finds in its part at the end, or what it raised."""
    parts: dict[int, dist.Store] = {}
    found: list[object] = [None] * WORLD_SIZE

    def join(rank: int) -> None:
        store = dist.FileStore(str(path), -1)
        try:
            parts[rank] = fresh_store(store, rank, WORLD_SIZE, timeout_s)
            parts[rank].add("here", 1)
        except RuntimeError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, part in parts.items():
        found[rank] = part.add("here", 0)
    return found


def test_each_start_has_a_part_of_its_own(tmp_path: Path) -> None:
    starts = [start(tmp_path / "store") for _ in range(4)]
    assert starts == [[WORLD_SIZE] * WORLD_SIZE] * 4


def test_a_start_that_broke_off_leaves_no_trace(tmp_path: Path) -> None:
    """Ranks that said hello and died are not taken for those of the next start."""
    broken = start(tmp_path / "store", range(1, WORLD_SIZE), timeout_s=0.3)
    assert "timeout" in str(broken[1]).lower()
    assert start(tmp_path / "store") == [WORLD_SIZE] * WORLD_SIZE


@pytest.mark.parametrize("present", [1, 2])
def test_ranks_that_do_not_come_are_named(tmp_path: Path, present: int) -> None:
    said = start(tmp_path / "store", range(present), timeout_s=0.3)
    assert said[0] == f"ranks {list(range(present, WORLD_SIZE))} did not join within 0.3 s"
