"""Sorted as Python sorts, for every width of key, by vector words and without them."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.ops import sorts
from torchrec_picasso.ops.ids import HotSlots, IdSpace, PackedTable
from torchrec_picasso.ops.row_order import RowRanges, locate_rows
from torchrec_picasso.ops.sorts import sort_with_tags, stable_order

CPU = torch.device("cpu")
DTYPES = (torch.int32, torch.int64)  # the second does not fit into a word with its place


@pytest.mark.parametrize("num_keys", [1, 9, 256, 257, 40_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_stable_order(num_keys: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_keys)
    keys_n = torch.randint(num_keys, (3000,), generator=generator).to(dtype)
    keys_n[:2] = num_keys - 1
    expected_n = sorted(range(3000), key=keys_n.tolist().__getitem__)
    assert stable_order(keys_n, num_keys).tolist() == expected_n


@pytest.mark.parametrize("dtype", DTYPES)
@given(keys=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**31 - 1))))
def test_keys_carry_their_places(dtype: torch.dtype, keys: list[int]) -> None:
    keys_N = torch.tensor(keys, dtype=dtype)
    sorted_N, places_N = sort_with_tags(keys_N)
    assert (sorted_N.dtype, places_N.dtype) == (dtype, torch.int64)
    expected = sorted((key, place) for place, key in enumerate(keys))
    assert list(zip(sorted_N.tolist(), places_N.tolist())) == expected
    assert keys_N.tolist() == keys  # untouched


@pytest.mark.parametrize("dtype", DTYPES)
@given(counts=st.lists(st.integers(0, 4), min_size=1), data=st.data())
def test_keys_carry_tags(dtype: torch.dtype, counts: list[int], data: st.DataObject) -> None:
    tags = [tag for tag, count in enumerate(counts) for _ in range(count)]
    keys = data.draw(st.lists(st.integers(0, 3), min_size=len(tags), max_size=len(tags)))
    keys_N, tags_N = torch.tensor(keys, dtype=dtype), torch.tensor(tags, dtype=torch.int64)
    found = sort_with_tags(keys_N, tags_N)
    assert list(zip(*(each.tolist() for each in found))) == sorted(zip(keys, tags))


@pytest.mark.parametrize("is_intel", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_tags", [True, False])
def test_many_keys_are_sorted_alike_on_every_processor(
    is_intel: bool, dtype: torch.dtype, with_tags: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorts, "is_intel", lambda: is_intel)
    generator = torch.Generator().manual_seed(0)
    keys_N = torch.randint(5_000, (sorts._LEAST_RADIX + 7,), generator=generator).to(dtype)
    tags_N = torch.arange(len(keys_N)) // 3 if with_tags else None
    sorted_N, found_N = sort_with_tags(keys_N, tags_N)
    tags = range(len(keys_N)) if tags_N is None else tags_N.tolist()
    assert list(zip(sorted_N.tolist(), found_N.tolist())) == sorted(zip(keys_N.tolist(), tags))


@given(seed=st.integers(0, 2**31), num_chunks=st.sampled_from([1, 2, 40]))
def test_rows_are_found_and_ordered_as_one_by_one(seed: int, num_chunks: int) -> None:
    rng = random.Random(seed)
    world_size, pack, tables = rng.choice([1, 3]), 0, []
    # by linear id: the pack, the home rank, the row there, the hot slot
    facts, stored, num_hot = [], Counter[tuple[int, int]](), 0
    for number in range(rng.randint(1, 4)):
        pack += rng.random() < 0.5 and number > 0
        blocks = [rng.randint(0, 4) for _ in range(world_size - 1)] + [2]
        hot = sorted(rng.sample(range(sum(blocks)), rng.randint(0, sum(blocks))))
        for row, rank in enumerate(rank for rank, rows in enumerate(blocks) for _ in range(rows)):
            facts.append((pack, rank, stored[pack, rank], num_hot if row in hot else None))
            stored[pack, rank] += 1
            num_hot += row in hot
        tables.append(
            PackedTable(
                name=f"t{number}",
                pack=pack,
                dim=4,
                block_rows_W=(*blocks,),
                hot_rows_H=torch.tensor(hot, dtype=torch.int64),
                feature_names=("f",),
            )
        )
    ids = sorted(rng.sample(range(len(facts)), rng.randint(0, len(facts))))
    chunks = [rng.randrange(num_chunks) for _ in ids]
    ranges = RowRanges.build(IdSpace.build(tables, CPU), HotSlots.build(tables, CPU))
    ids_U, chunk_U = torch.tensor(ids, dtype=torch.int32), torch.tensor(chunks, dtype=torch.int64)
    found = locate_rows(ids_U, ranges, chunk_U, num_chunks)

    rows = [(*facts[row], chunk, place) for place, (row, chunk) in enumerate(zip(ids, chunks))]
    rows.sort(key=lambda row: (row[0], *((-1, 0) if row[3] is not None else (row[4], row[1]))))
    assert found.order_U.tolist() == [place for *_, place in rows]
    slots = [slot for _, _, _, slot, *_ in rows]
    stored_in = [home if slot is None else slot for (_, _, home, *_), slot in zip(rows, slots)]
    assert found.storage_row_U.tolist() == stored_in
    counts = Counter(
        (pack, 0 if slot is not None else 1 + chunk * world_size + rank)
        for pack, rank, _, slot, chunk, _ in rows
    )
    assert {at: n for at, n in np.ndenumerate(found.counts_PQ.numpy()) if n} == counts
    bits = np.unpackbits(found.used_bits_X.numpy().view(np.uint8), bitorder="little")
    assert bits.nonzero()[0].tolist() == sorted(slot for slot in slots if slot is not None)
