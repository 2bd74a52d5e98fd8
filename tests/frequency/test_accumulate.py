"""Counters agree with numpy on any stream; beyond their budget they keep their bounds."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.samples import HUGE, as_dict, chunks_of, counted, table_of, true_counts
from torchrec_picasso.frequency import counts as counters
from torchrec_picasso.frequency.counts import LookupCounter

# 60 ids: dense below 4 * 15 rows counted, sorted otherwise
NUM_IDS = 60
STREAM = chunks_of(NUM_IDS)


@pytest.fixture(autouse=True, scope="module")
def _fold_small_chunks() -> Iterator[None]:
    """Half a million ids would wait otherwise, and no test here could fold twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "_MIN_PENDING_LOOKUPS", 1)
        yield


@given(STREAM, st.sampled_from([NUM_IDS, NUM_IDS + 1, 4 * NUM_IDS + 1, HUGE, 1 << 40, None]))
def test_counts_are_exact_while_rows_fit(
    chunks: list[list[int]], num_embeddings: int | None
) -> None:
    counts = counted(chunks, num_embeddings, max_rows_counted=NUM_IDS)
    true = true_counts(chunks)
    assert as_dict(counts) == true
    assert (counts.rows_U.diff() > 0).all()
    assert counts.rows_U.dtype == counts.counts_U.dtype == torch.int64
    assert not counts.max_undercount
    assert counts.num_rows_seen == len(true)
    assert counts.num_lookups == true.total()
    smallest_table = 1 + max(true, default=-1)
    assert counts.num_embeddings == (smallest_table if num_embeddings is None else num_embeddings)


@given(STREAM, st.integers(1, 12))
def test_beyond_the_budget_counts_keep_the_bounds_of_misra_and_gries(
    chunks: list[list[int]], max_rows: int
) -> None:
    counts = counted(chunks, HUGE, max_rows_counted=max_rows)
    true = true_counts(chunks)
    head = as_dict(counts)
    assert counts.rows_U.numel() <= max_rows
    assert counts.max_undercount <= true.total() / (max_rows + 1)
    for row, count in true.items():
        assert count - counts.max_undercount <= head.get(row, 0) <= count
    assert set(head) <= set(true)
    assert counts.num_lookups == true.total()
    assert (not counts.max_undercount) == (len(true) <= max_rows)


@given(STREAM, STREAM, st.sampled_from([NUM_IDS, HUGE]))
def test_ranks_that_merge_know_what_one_pass_knows(
    mine: list[list[int]], theirs: list[list[int]], num_embeddings: int
) -> None:
    ranks = [counted(chunks, num_embeddings) for chunks in (mine, theirs)]
    assert ranks[0].merge(ranks[1]) == counted([*mine, *theirs], num_embeddings)


@pytest.mark.parametrize("num_embeddings", [1 << 41, None])
def test_ids_beyond_32_bits_are_counted(num_embeddings: int | None) -> None:
    counts = counted([[1 << 40, 3], [1 << 40]], num_embeddings)
    assert as_dict(counts) == {3: 1, 1 << 40: 2}


def test_ids_may_be_a_view_that_changes_later() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "_MIN_PENDING_LOOKUPS", 100)
        counter = LookupCounter(table_of(HUGE))
        batch = np.array([5, 6, 7])
        counter.add(batch[1:])
        batch[:] = 0
        assert as_dict(counter.result()) == {6: 1, 7: 1}
