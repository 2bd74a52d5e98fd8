"""Clean rows come first and in one exchange, dirty rows chunk by chunk; both sides order alike."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.ops.fetch_order import CLEAN, dirty_exchange, find_fetch_order


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_every_row_has_its_place(data: st.DataObject, num_chunks: int, world_size: int) -> None:
    counts = st.lists(st.integers(0, 4), min_size=world_size, max_size=world_size)
    counts_KW = data.draw(st.lists(counts, min_size=num_chunks, max_size=num_chunks))
    rows = [
        (chunk, rank)
        for chunk, counts_W in enumerate(counts_KW)
        for rank, count in enumerate(counts_W)
        for _ in range(count)
    ]
    is_dirty = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    order = find_fetch_order(counts_KW, torch.tensor(is_dirty, dtype=torch.bool))

    exchanges = [
        dirty_exchange(chunk) if late else CLEAN for (chunk, _), late in zip(rows, is_dirty)
    ]
    # as Python sorts: by exchange, then by rank, else as they came
    by_hand = sorted(range(len(rows)), key=lambda i: (exchanges[i], rows[i][1]))
    assert order.num_rows == len(rows)
    assert order.arrange(torch.arange(len(rows))).tolist() == by_hand
    assert order.positions(torch.device("cpu")).argsort().tolist() == by_hand
    for exchange in range(1 + num_chunks):
        own = [rows[i][1] for i in by_hand[order.rows(exchange)]]
        assert [exchanges[i] for i in by_hand[order.rows(exchange)]] == [exchange] * len(own)
        assert order.counts_EW[exchange] == [own.count(rank) for rank in range(world_size)]


def test_without_marks_all_rows_are_dirty_and_stay_in_request_order() -> None:
    order = find_fetch_order([[2, 1], [0, 3]], None)
    values = torch.arange(6)
    assert order.arrange(values) is values
    assert order.positions(torch.device("cpu")).tolist() == values.tolist()
    assert order.counts_EW[CLEAN] == [0, 0]
    assert order.rows(dirty_exchange(0)) == slice(0, 3)
    assert order.rows(dirty_exchange(1)) == slice(3, 6)
