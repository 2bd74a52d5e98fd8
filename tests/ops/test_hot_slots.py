"""Hot slots that any rank's batch uses, from the bits that ranks send."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from torchrec_picasso.ops.ids import HotSlots, pack_bits


@pytest.mark.parametrize("num_hot", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_union_of_all_ranks_slots_is_found_by_pack(num_hot: int, num_ranks: int) -> None:
    rng = random.Random(num_hot)
    touched_WH = torch.tensor(
        [[rng.random() < 0.1 for _ in range(num_hot)] for _ in range(num_ranks)], dtype=torch.bool
    ).view(num_ranks, num_hot)
    bits_WX = np.stack([pack_bits(mask_H).numpy() for mask_H in touched_WH])
    assert bits_WX.shape == (num_ranks, -(-num_hot // 64))
    union_t = touched_WH.any(0).nonzero().flatten()
    for starts in ((0, num_hot), (0, num_hot // 3, num_hot)):
        found = HotSlots(torch.arange(num_hot), starts).touched(bits_WX)
        for (start, end), touched in zip(pairwise(starts), found, strict=True):
            expected = union_t[(union_t >= start) & (union_t < end)] - start
            assert torch.equal(touched, expected)
