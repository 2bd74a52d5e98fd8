"""Features whose lengths do not fit are put aside before anything is done by them.

Reordering lookups by lengths that are not theirs reads and writes beyond the tensors, and one rank
that raises leaves the others waiting. So what is wrong goes on as an empty batch that knows why,
and the header tells all ranks of it.
"""

from __future__ import annotations

from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["UnsoundFeatures", "complaint_of", "sound_features"]


class UnsoundFeatures(KeyedJaggedTensor):
    """Features without lookups, in place of some whose lengths do not fit."""

    complaint: str
    """What is wrong with those, one sentence."""

    @staticmethod
    def of(features: KeyedJaggedTensor, complaint: str) -> UnsoundFeatures:
        """Empties features.

        Args:
            features: Keys and batch sizes are theirs.
            complaint: What is wrong with them.
        """
        variable, weights_N = features.variable_stride_per_key(), features.weights_or_none()
        num_bags = sum(features.stride_per_key())
        # other ranks reckon with lengths of this type where tables are TorchRec's
        lengths_S = features.lengths().new_zeros(num_bags)
        empty = UnsoundFeatures(
            keys=features.keys(),
            values=features.values()[:0],
            weights=None if weights_N is None else weights_N[:0],
            lengths=lengths_S,
            stride=None if variable else features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
            inverse_indices=features.inverse_indices_or_none(),
        )
        empty.complaint = complaint
        return empty

    def permute(self, *args: Any, **kwargs: Any) -> UnsoundFeatures:
        """The same in another order."""
        return UnsoundFeatures.of(super().permute(*args, **kwargs), self.complaint)

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Some of the keys after the other."""
        return [UnsoundFeatures.of(part, self.complaint) for part in super().split(segments)]


def sound_features(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Features as they are, if their lengths fit; else :class:`UnsoundFeatures`.

    On an accelerator they are as they are in any case: to look would be a host sync.

    Args:
        features: As the batch has them.

    Cost:
        O(S) time.
    """
    complaint = complaint_of(features) if features.values().device.type == "cpu" else None
    return features if complaint is None else UnsoundFeatures.of(features, complaint)


def complaint_of(features: KeyedJaggedTensor) -> str | None:
    """What is wrong with lengths, one sentence; ``None`` = nothing."""
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
    if num_bags and int(lengths_S.min()) < 0:
        return f"{whose} a length of {int(lengths_S.min())}; expected none below 0"
    return None
