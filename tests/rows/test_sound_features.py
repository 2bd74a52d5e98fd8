"""Lengths that do not fit are put aside before lookups are reordered by them."""

from __future__ import annotations

import pytest
import torch
from torchrec import KeyedJaggedTensor

from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.errors import InputError
from torchrec_picasso.rows.sound_features import UnsoundFeatures, sound_features
from torchrec_picasso.sharding.features import with_own_weights, with_weights


def features(lengths: list[int], num_values: int = 4, num_weights: int | None = None) -> object:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(num_values, dtype=torch.int32),
        lengths=torch.tensor(lengths),
        weights=None if num_weights is None else torch.ones(num_weights),
        stride=2,
    )


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (features([1, 2, 0, 2]), "lengths that sum to 5, but 4 values; expected the same number"),
        (features([1, 1, 0, 2], 4, 3), "sum to 4, but 4 values and 3 per-sample weights"),
        (features([3, -1, 0, 2]), "a length of -1; expected none below 0"),
        (features([3, 1, 0]), "3 lengths, expected 4, one for each bag"),
    ],
)
def test_what_does_not_fit_goes_on_empty_and_says_why(
    given: KeyedJaggedTensor, complaint: str
) -> None:
    found = sound_features(given)
    weighted = (with_own_weights(found), with_weights(found, None))
    parts = (found.permute([1, 0]), *found.split([1, 1]), *found.split([2]))
    for unsound in (found, *weighted, *parts):
        assert isinstance(unsound, UnsoundFeatures)
        assert "features a, b has " in unsound.complaint
        assert complaint in unsound.complaint
        assert unsound.values().dtype == torch.int32
        assert unsound.values().numel() == int(unsound.lengths().sum()) == 0
        assert unsound.lengths().numel() == 2 * len(unsound.keys())
        assert unsound.lengths().dtype == torch.int64  # as other ranks have them
        assert unsound.stride() == 2
    assert weighted[0].weights().numel() == 0
    assert weighted[1].weights_or_none() is None


def test_what_fits_stays_as_it_is() -> None:
    for given in (features([1, 1, 0, 2]), features([0, 0, 0, 0], 0), features([1, 1, 0, 2], 4, 4)):
        assert sound_features(given) is given


def test_a_feature_of_less_than_no_lookups_is_not_cut() -> None:
    with pytest.raises(InputError, match=r"batch: lengths of a feature that sum to -1, expected"):
        split_batch(features([-1, 1, 2, 2]), [1, 1])
