"""Validates lengths before any use, and replaces malformed lengths by valid ones.

Reordering lookups by malformed lengths reads and writes beyond the tensors, and the reordered
result is consistent with any lengths, so the error cannot be detected afterwards. A rank that
raises alone leaves the other ranks waiting. Malformed lengths are therefore repaired first, and the
header reports the error to all ranks. On an accelerator a check of lengths is a host sync: there
lengths are always repaired, and the flag whether the repair changed them stays on the device until
the header.

Shape letters: N lookups, S bags.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.rows.kjt import like

__all__ = ["RepairedFeatures", "are_bad", "length_error", "valid_features"]


class RepairedFeatures(KeyedJaggedTensor):
    """Features with valid lengths, in place of features whose lengths may be malformed."""

    given: KeyedJaggedTensor
    """The input features."""
    is_bad: Tensor | bool
    """Whether the input's lengths are malformed; 0-d bool on the device, or known on the host."""

    @staticmethod
    def repair(given: KeyedJaggedTensor) -> RepairedFeatures:
        """Repairs lengths; valid lengths are not changed. No host sync.

        Each bag keeps its length as long as there are values; the last bag gets the remaining
        values.

        Args:
            given: Features of the input batch.

        Cost:
            8 launches on integers of S bags.
        """
        values_N, weights_N, given_S = given.values(), given.weights_or_none(), given.lengths()
        num_bags, counts = sum(given.stride_per_key()), {values_N.numel()}
        if weights_N is not None:
            counts.add(weights_N.numel())
        num_lookups = min(counts) if num_bags else 0
        lengths_S = given_S if given_S.numel() == num_bags else given_S.new_zeros(num_bags)
        offsets_S1 = lengths_S.new_zeros(num_bags + 1, dtype=torch.int64)
        # Clamped lengths are at least 0, so the sums ascend, and at most N, so no sum overflows.
        torch.cumsum(lengths_S.clamp(0, num_lookups), 0, out=offsets_S1[1:])
        offsets_S1.clamp_(max=num_lookups)[-1:] = num_lookups
        offsets_S1 = offsets_S1.to(given_S.dtype)
        # Differences of clamped offsets, shape (S,): the sum is N by construction.
        mended_S = torch.diff(offsets_S1)
        weights_N = None if weights_N is None else weights_N[:num_lookups]
        mended = like(
            given, RepairedFeatures, values_N[:num_lookups], weights_N, mended_S, offsets_S1
        )
        shapes_fit = lengths_S is given_S and counts == {num_lookups}
        mended.given = given
        mended.is_bad = (mended_S != given_S).any() if shapes_fit else True
        return mended

    @staticmethod
    def with_weights(mended: RepairedFeatures, weights_N: Tensor | None) -> RepairedFeatures:
        """Returns the same features with other per-sample weights; no copy."""
        lengths_S, offsets_S1 = mended.lengths(), mended.offsets_or_none()
        other = like(mended, RepairedFeatures, mended.values(), weights_N, lengths_S, offsets_S1)
        other.given, other.is_bad = mended.given, mended.is_bad
        return other


def valid_features(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns features with valid lengths: the input if known to be valid, else repaired ones.

    Args:
        features: Features of the input batch.

    Cost:
        O(S) time; no host sync on an accelerator.
    """
    if isinstance(features, RepairedFeatures):
        return features
    if features.values().device.type == "cpu" and length_error(features) is None:
        return features
    return RepairedFeatures.repair(features)


def are_bad(sound: Iterable[KeyedJaggedTensor]) -> Tensor | bool:
    """Whether any lengths were malformed before :func:`valid_features`.

    Args:
        sound: Results of :func:`valid_features`.

    Returns:
        0-d bool on the device, or a ``bool`` known on the host.
    """
    flags = (features.is_bad for features in sound if isinstance(features, RepairedFeatures))
    return reduce(or_, flags, False)


def length_error(features: KeyedJaggedTensor) -> str | None:
    """Describes malformed lengths in one sentence; ``None`` = the lengths are valid."""
    lengths_S, num_values = features.lengths(), features.values().numel()
    weights_N, num_bags = features.weights_or_none(), sum(features.stride_per_key())
    whose = f"the KeyedJaggedTensor of features {', '.join(features.keys())} has"
    if lengths_S.numel() != num_bags:
        return f"{whose} {lengths_S.numel()} lengths, expected {num_bags}, one for each bag"
    total = int(lengths_S.sum())
    if total != num_values or (weights_N is not None and weights_N.numel() != num_values):
        weights = "" if weights_N is None else f" and {weights_N.numel()} per-sample weights"
        return (
            f"{whose} lengths that sum to {total}, but {num_values} values{weights}; expected the "
            "same number. Were values, weights or lengths cut without the others?"
        )
    if not num_bags:
        return None
    # A negative length can be compensated by a larger one, so the sum is no proof.
    lowest, highest = map(int, lengths_S.aminmax())
    if lowest < 0 or highest > num_values:  # the sum may have overflowed
        wrong = lowest if lowest < 0 else highest
        return f"{whose} a length of {wrong}; expected 0 to {num_values}, the number of its values"
    return None
