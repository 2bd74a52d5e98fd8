"""Hypothesis strategies of jagged batches: empty bags, repeats, one id, all ids, empty batches.

A batch is plain data (bags of ids by feature), so that it prints readably, shrinks well and travels
to ranks; ``to_kjt`` makes TorchRec's tensor of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

Bags = dict[str, list[list[int]]]
"""Ids of each sample's bag, by feature; every feature has one bag per sample."""


@st.composite
def bags_of_samples(
    draw: st.DrawFn, rows_of_feature: Mapping[str, int], max_batch_size: int = 4
) -> Bags:
    """One rank's batch, of 0 to ``max_batch_size`` samples."""
    batch_size = draw(st.integers(0, max_batch_size))
    return {
        feature: [draw(_bag(num_rows)) for _ in range(batch_size)]
        for feature, num_rows in rows_of_feature.items()
    }


def steps_of_ranks(
    rows_of_feature: Mapping[str, int], world_size: int, num_steps: int
) -> st.SearchStrategy[list[list[Bags]]]:
    """Batches by step, then by rank; each rank has its own batch size in each step."""
    ranks = st.lists(bags_of_samples(rows_of_feature), min_size=world_size, max_size=world_size)
    return st.lists(ranks, min_size=num_steps, max_size=num_steps)


def _bag(num_rows: int) -> st.SearchStrategy[list[int]]:
    anywhere = st.integers(0, num_rows - 1)
    return st.one_of(
        st.just([]),
        st.lists(anywhere, max_size=6),
        st.lists(st.just(0), min_size=1, max_size=4),  # one id, repeated
        st.just(list(range(num_rows))),  # all ids
    )


def to_kjt(bags: Bags) -> KeyedJaggedTensor:
    """TorchRec's tensor of one rank's batch."""
    lengths = [len(bag) for of_feature in bags.values() for bag in of_feature]
    ids = [row for of_feature in bags.values() for bag in of_feature for row in bag]
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=len(next(iter(bags.values()))),
    )
