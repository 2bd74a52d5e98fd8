"""Cuts of the homes: every row has one home, and the homes are asked for equally much."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_picasso.planner.home_blocks import RowLoads, balance_homes, even_blocks, filled_blocks


def table(rows: int, load: np.ndarray, spread: float = 0.0) -> RowLoads:
    """Loads of the first rows of a table."""
    return RowLoads(
        num_embeddings=rows,
        rows_U=np.arange(load.size),
        load_U=load.astype(np.float64),
        spread_load=spread,
    )


def may_stand(blocks: tuple[int, ...]) -> bool:
    """Whether a checkpoint can hold these blocks, and no rank lacks a row that it could have."""
    filled = sum(rows > 0 for rows in blocks)
    return filled == min(len(blocks), sum(blocks)) and all(blocks[:filled])


@settings(deadline=None)
@given(data=st.data(), world_size=st.integers(1, 9), most_rows=st.sampled_from([9, 60]))
def test_every_row_has_one_home(data: st.DataObject, world_size: int, most_rows: int) -> None:
    tables = []
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.integers(1, most_rows))
        seen = sorted(data.draw(st.sets(st.integers(0, rows - 1))))
        loads = [data.draw(st.floats(0, 100)) for _ in seen]
        tables.append(
            RowLoads(
                num_embeddings=rows,
                rows_U=np.array(seen, dtype=np.int64),
                load_U=np.array(loads, dtype=np.float64),
                spread_load=data.draw(st.floats(0, 100)),
            )
        )
    homes = balance_homes(tables, world_size)
    for cut, of in zip(homes.block_rows_TW, tables, strict=True):
        assert len(cut) == world_size
        assert may_stand(cut)
        assert sum(cut) == of.num_embeddings
    if all(may_stand(even_blocks(of.num_embeddings, world_size)) for of in tables):
        assert homes.max_over_mean <= homes.even_max_over_mean + 1e-9
    # the balance reported is the balance of the cuts
    loads = np.zeros(world_size)
    for cut, of in zip(homes.block_rows_TW, tables):
        dense = np.full(of.num_embeddings, of.spread_load / of.num_embeddings)
        dense[of.rows_U] += of.load_U
        loads += [part.sum() for part in np.split(dense, np.cumsum(cut)[:-1])]
    if loads.sum() > 1e-6:
        assert homes.max_over_mean == pytest.approx(loads.max() / loads.mean(), rel=1e-6)


def test_a_row_that_outweighs_a_rank_is_the_limit() -> None:
    homes = balance_homes([table(100, np.array([90.0] + [1.0] * 99))], 4)
    assert homes.max_over_mean == pytest.approx(90 / (189 / 4), rel=0.05)


def test_rows_are_spread_too() -> None:
    """All requests go to ten rows, but a rank has at most 51 times the mean of the rows."""
    blocks = balance_homes([table(100_000, np.ones(10))], 64).block_rows_TW[0]
    assert max(blocks) <= 51 * 100_000 / 64 + 1


@given(rows=st.integers(1, 10_000), world_size=st.integers(1, 300))
def test_equal_blocks_leave_no_rank_empty_that_could_have_a_row(rows: int, world_size: int) -> None:
    torchrecs, filled = even_blocks(rows, world_size), filled_blocks(rows, world_size)
    assert sum(filled) == rows
    assert may_stand(filled)
    assert max(filled) <= max(torchrecs)
    if may_stand(torchrecs):
        assert filled == torchrecs


@pytest.mark.parametrize("seen", [range(8), range(0), [0], [7], [3, 4]])
def test_rows_that_nobody_requests_are_no_reason_for_an_empty_block(seen: object) -> None:
    # all rows hot, and one row with all requests: the cuts that load alone would make coincide
    rows_U = np.array(seen, dtype=np.int64)
    for load in (0.0, 1e6):
        of = RowLoads(
            num_embeddings=8, rows_U=rows_U, load_U=np.full(rows_U.size, load), spread_load=0.0
        )
        for world_size in range(1, 12):
            for blocks in balance_homes([of, of], world_size).block_rows_TW:
                assert may_stand(blocks)


def test_equal_blocks_are_torchrecs() -> None:
    assert even_blocks(10, 4) == (3, 3, 3, 1)
    assert even_blocks(2, 4) == (1, 1, 0, 0)
    assert even_blocks(5, 4) == (2, 2, 1, 0)
    assert filled_blocks(5, 4) == (2, 1, 1, 1)
    balanced = balance_homes([table(8, np.ones(8))], 4)
    assert balanced.block_rows_TW == ((2, 2, 2, 2),)
