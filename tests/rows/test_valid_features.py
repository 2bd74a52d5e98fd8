"""Lengths that do not fit are mended before lookups are reordered by them; all ranks hear it."""

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.rows.worlds import features_of, make_world
from tests.support.pretended_device import PretendedDevice, in_place_of_the_device, on_device
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.errors import InputError
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.rows.valid_features import (
    RepairedFeatures,
    are_bad,
    form_error,
    in_order,
    valid_features,
    with_own_weights,
    with_weights,
)


def features(lengths: list[int], num_values: int = 4, num_weights: int | None = None) -> object:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(num_values, dtype=torch.int32),
        lengths=torch.tensor(lengths),
        weights=None if num_weights is None else torch.ones(num_weights),
        stride=2,
    )


BAD = [
    (features([1, 2, 0, 2]), "lengths that sum to 5, but 4 values; expected the same number"),
    (features([1, 1, 0, 0]), "lengths that sum to 2, but 4 values; expected the same number"),
    (features([1, 1, 0, 2], 4, 3), "sum to 4, but 4 values and 3 per-sample weights"),
    (features([3, -1, 0, 2]), "a length of -1; expected 0 to 4, the number of its values"),
    (features([2**62, 2**62, 2**62, 2**62 + 4]), "a length of 4611686018427387908;"),
    (features([3, 1, 0]), "3 lengths, expected 4, one for each bag"),
]


@pytest.mark.parametrize(("given", "complaint"), BAD)
def test_what_does_not_fit_is_said(given: KeyedJaggedTensor, complaint: str) -> None:
    message = form_error(given)
    assert "features a, b has " in message
    assert complaint in message


@pytest.mark.parametrize("given", [given for given, _ in BAD])
def test_what_does_not_fit_is_made_to(given: KeyedJaggedTensor) -> None:
    found = RepairedFeatures.repair(given)
    weighted = (with_own_weights(found), with_weights(found, None))
    for mended in (found, *weighted):
        assert are_bad([mended])
        assert mended.given is given
    for mended in (found, *weighted, found.permute([1, 0])):
        assert form_error(mended) is None
        assert mended.values().dtype == torch.int32
        assert mended.lengths().dtype == torch.int64  # as other ranks have them
        assert mended.stride() == 2
    assert weighted[0].weights().numel() == found.values().numel()
    assert weighted[1].weights_or_none() is None


FITTING = [
    features([1, 1, 0, 2]),
    features([0, 0, 0, 0], 0),
    features([1, 1, 0, 2], 4, 4),
    KeyedJaggedTensor(keys=[], values=torch.arange(0), lengths=torch.arange(0)),
]


@pytest.mark.parametrize("given", FITTING)
def test_what_fits_stays_as_it_is(given: KeyedJaggedTensor) -> None:
    assert valid_features(given) is given
    mended = RepairedFeatures.repair(given)  # as where nobody can look
    assert not are_bad([mended, given])
    for mine, its in zip(
        (mended.values(), mended.weights_or_none(), mended.lengths(), mended.offsets()),
        (given.values(), given.weights_or_none(), given.lengths(), given.offsets()),
    ):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


BAGS = [[[0, 1], [1]], [[1], []], [[0], [1]], [[1], [1]], [[0], [1]]]
ORDER = [4, 2, 0, 1, 3]


@pytest.mark.parametrize("change", [-2, 0, 3, -30])
def test_on_a_device_the_header_tells_what_a_reorder_hides(change: int) -> None:
    world = make_world(2)
    given = features_of(world, BAGS)
    lengths = given.lengths().clone()
    lengths[0] += change
    requests = []
    for rank, group in enumerate(map(on_device, world.groups)):
        with in_place_of_the_device(), PretendedDevice() as device:
            on_rank = KeyedJaggedTensor(
                keys=[given.keys()[ORDER.index(place)] for place in range(len(ORDER))],
                values=on_device(given.values()),
                lengths=on_device(lengths if rank == 0 else given.lengths()),
                stride=2,
            )
            validated = valid_features(on_rank)
            assert not device.syncs
            assert device.totals[0] <= 11, device.table()
            ordered = in_order(validated, ORDER, on_device(torch.tensor(ORDER, dtype=torch.int32)))
            assert not device.syncs
            assert form_error(ordered) is None  # what nobody would see any more
            assert device.syncs, "a look at lengths is a wait"
            device.syncs.clear()
            requests.append(RowRequest(group, [ordered], validated=[validated]))
            assert not device.syncs
    at_fault, other = requests
    if not change:
        with in_place_of_the_device(), PretendedDevice():
            assert at_fault.send_row_numbers()
        return
    own = f"lengths that sum to {10 + change}, but 10 values"
    with pytest.raises(InputError, match=own), in_place_of_the_device(), PretendedDevice():
        at_fault.send_row_numbers()
    others = "rank 0 holds lengths that do not fit its values"
    with pytest.raises(InputError, match=others), in_place_of_the_device(), PretendedDevice():
        other.send_row_numbers()


def test_a_feature_of_less_than_no_lookups_is_not_cut() -> None:
    with pytest.raises(InputError, match=r"batch: lengths of a feature that sum to -1, expected"):
        split_batch(features([-1, 1, 2, 2]), [1, 1])
