"""Validates lengths before any use, and replaces malformed lengths by valid ones, and ids that are
no integers by 0; and other copies of features, with other weights or padded.

Reordering lookups by malformed lengths reads and writes beyond the tensors, and the reordered
result is consistent with any lengths, so the error cannot be detected afterwards. A rank that
raises alone leaves the other ranks waiting. Malformed lengths are therefore repaired first, and the
header reports the error to all ranks. On an accelerator a check of lengths is a host sync: there
lengths are always repaired, and the flag whether the repair changed them stays on the device until
the header.

Shape letters: F features, N lookups, S bags, W ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate
from operator import or_

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.batches.members import made_like
from torchrec_picasso.errors import InputError
from torchrec_picasso.exchange.header import Header
from torchrec_picasso.ops.ids import PackedTable

_MALFORMED = "lengths that do not fit its values, or ids that are no integers,"


class RepairedFeatures(KeyedJaggedTensor):
    """Features with valid lengths and integers as ids, in place of others that may be malformed."""

    given: KeyedJaggedTensor
    """The input features."""
    is_bad: Tensor | bool
    """Whether the input was repaired; 0-d bool on the device, or known on the host."""

    @staticmethod
    def repair(given: KeyedJaggedTensor) -> RepairedFeatures:
        """Repairs lengths; valid lengths are not changed. No host sync, 11 launches, 8 on ``(S,)``.

        Each bag keeps its length as long as there are values; the last bag gets the remaining
        values. Ids of a floating type become 0.
        """
        values_N, weights_N, given_S = given.values(), given.weights_or_none(), given.lengths()
        are_integers = not values_N.is_floating_point()
        if not are_integers:
            values_N = torch.zeros_like(values_N, dtype=torch.int64)
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
        own = {"values": values_N[:num_lookups], "weights": weights_N, "lengths": mended_S}
        mended: RepairedFeatures = made_like(given, RepairedFeatures, offsets=offsets_S1, **own)
        shapes_fit = lengths_S is given_S and counts == {num_lookups}
        mended.given = given
        mended.is_bad = (mended_S != given_S).any() if shapes_fit and are_integers else True
        return mended


def valid_features(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the input if it is known to be valid, else repaired features. O(S) time; no host sync
    on an accelerator."""
    if isinstance(features, RepairedFeatures):
        return features
    if features.values().device.type == "cpu" and form_error(features) is None:
        return features
    return RepairedFeatures.repair(features)


def are_bad(validated: Iterable[KeyedJaggedTensor]) -> Tensor | bool:
    """Whether :func:`valid_features`, with these results, repaired any features. 0-d bool on the
    device, or a ``bool`` known on the host."""
    flags = [features.is_bad for features in validated if isinstance(features, RepairedFeatures)]
    return reduce(or_, flags) if flags else False


def form_error(features: KeyedJaggedTensor) -> str | None:
    """Describes malformed lengths, or ids that are no integers, in one sentence; ``None`` = there
    are none."""
    lengths_S, num_values = features.lengths(), features.values().numel()
    weights_N, num_bags = features.weights_or_none(), sum(features.stride_per_key())
    whose = f"the KeyedJaggedTensor of features {', '.join(features.keys())} has"
    if features.values().is_floating_point():
        return f"{whose} ids of type {features.values().dtype}; expected integers"
    if lengths_S.numel() != num_bags:
        return f"{whose} {lengths_S.numel()} lengths, expected {num_bags}, one for each bag"
    lengths = lengths_S.cpu().numpy()  # few operators: this runs for every batch
    total = int(lengths.sum(dtype=np.int64))
    if total != num_values or (weights_N is not None and weights_N.numel() != num_values):
        weights = "" if weights_N is None else f" and {weights_N.numel()} per-sample weights"
        return (
            f"{whose} lengths that sum to {total}, but {num_values} values{weights}; expected the "
            "same number. Were values, weights or lengths cut without the others?"
        )
    if not num_bags:
        return None
    # A negative length can be compensated by a larger one, so the sum is no proof.
    lowest, highest = int(lengths.min()), int(lengths.max())
    if lowest < 0 or highest > num_values:  # the sum may have overflowed
        wrong = lowest if lowest < 0 else highest
        return f"{whose} a length of {wrong}; expected 0 to {num_values}, the number of its values"
    return None


def raise_on_bad_input(
    header: Header,
    tables: Sequence[PackedTable],
    features: KeyedJaggedTensor,
    validated: Sequence[KeyedJaggedTensor],
    rank: int,
) -> None:
    """Raises if any rank's batch is malformed or holds an invalid id or weight.

    All ranks raise together; the rank with the error names feature, table, value and range. Tables
    are in the order of this rank's features, which ``validated`` has before they were concatenated.
    """
    given = [mended.given for mended in validated if isinstance(mended, RepairedFeatures)]
    errors = filter(None, map(form_error, given))
    # The rank with the error describes its own values; the other ranks name that rank.
    for counts_W, describe, what in (
        (header.bad_lengths_W, lambda *_: next(errors), _MALFORMED),
        (header.outside_ids_W, _describe_outside_id, "ids outside their tables"),
        (header.bad_weights_W, _describe_bad_weight, "per-sample weights that are not finite"),
    ):
        if counts_W[rank]:
            raise InputError(describe(tables, features, counts_W[rank]))
        for other, count in enumerate(counts_W):
            if count:
                number = "" if count is True else f"{count} "
                raise InputError(
                    f"rank {other} holds {number}{what} in this batch; its own error names them, "
                    "and all ranks stop here together"
                )


def _describe_outside_id(
    tables: Sequence[PackedTable], features: KeyedJaggedTensor, count: int
) -> str:
    # Repeats the check of shift_rows on the host, to find the first invalid lookup.
    rows_F = torch.tensor([t.num_embeddings for t in tables for _ in t.feature_names])
    rows_N = rows_F.repeat_interleave(torch.tensor(features.length_per_key()))
    ids_N = features.values().cpu()
    first, feature, table = _first_bad((ids_N < 0) | (ids_N >= rows_N), tables, features)
    return (
        f"feature {feature!r} looks up row {int(ids_N[first])} of table {table.name!r}, whose rows "
        f"are 0..{table.num_embeddings - 1}; {count} such ids in this rank's batch. Hash or clamp "
        "ids before training"
    )


def _describe_bad_weight(
    tables: Sequence[PackedTable], features: KeyedJaggedTensor, count: int
) -> str:
    weights_N = features.weights().cpu()
    first, feature, table = _first_bad(~torch.isfinite(weights_N), tables, features)
    return (
        f"feature {feature!r} of table {table.name!r} has per-sample weight "
        f"{float(weights_N[first])}, expected a finite number; {count} such weights in this rank's "
        "batch"
    )


def _first_bad(
    is_bad_N: Tensor, tables: Sequence[PackedTable], features: KeyedJaggedTensor
) -> tuple[int, str, PackedTable]:
    first = int(is_bad_N.nonzero()[0])
    index = bisect_right(list(accumulate(features.length_per_key())), first)
    return first, features.keys()[index], [t for t in tables for _ in t.feature_names][index]


def with_weights(features: KeyedJaggedTensor, weights_N: Tensor | None) -> KeyedJaggedTensor:
    """Replaces the per-sample weights, float ``(N,)`` or ``None``; the rest is not copied."""
    kind = RepairedFeatures if isinstance(features, RepairedFeatures) else KeyedJaggedTensor
    offsets_S1 = features.offsets_or_none()
    other: KeyedJaggedTensor = made_like(features, kind, weights=weights_N, offsets=offsets_S1)
    if isinstance(features, RepairedFeatures) and isinstance(other, RepairedFeatures):
        other.given, other.is_bad = features.given, features.is_bad
    return other


def with_own_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Replaces the weights by a copy; by zeros if the features have none."""
    weights_N = features.weights_or_none()
    if weights_N is None:
        weights_N = torch.zeros_like(features.values(), dtype=torch.float32)
    return with_weights(features, weights_N.clone())


def in_order(
    features: KeyedJaggedTensor, order: Sequence[int], order_tensor: Tensor
) -> KeyedJaggedTensor:
    """Permutes features like TorchRec's ``permute``, given valid lengths. Where each feature comes
    once, no host sync asks a device for the number of its lookups."""
    keys = features.keys()
    if features.variable_stride_per_key() or sorted(order) != list(range(len(keys))):
        return features.permute(list(order), order_tensor)
    values_N, weights_N = features.values(), features.weights_or_none()
    lengths_FB, values_N, weights_N = torch.ops.fbgemm.permute_2D_sparse_data(
        order_tensor, features.lengths().view(len(keys), -1), values_N, weights_N, values_N.numel()
    )
    return KeyedJaggedTensor(
        keys=[keys[number] for number in order],
        values=values_N,
        weights=weights_N,
        lengths=lengths_FB.view(-1),
        stride=features.stride(),
    )


def padded(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Pads features of different batch sizes with empty bags to the largest batch size.

    Home ranks that pool bags for other ranks receive one number of samples, and sequences are
    returned with one batch size. TorchRec's ``pad_vbe_kjt_lengths`` drops weights and loops over
    features.
    """
    lengths_S, num_features = features.lengths(), len(features.keys())
    sizes_F = torch.tensor(features.stride_per_key()).to(lengths_S.device, non_blocking=True)
    most = max(features.stride_per_key())
    # Mask (F, B_max) of the bags that exist; masked_scatter_ copies the lengths, which are ordered
    # by feature, into it. Values do not change: padded bags are empty.
    is_own_FS = torch.arange(most, device=lengths_S.device) < sizes_F.unsqueeze(1)
    lengths_FS = lengths_S.new_zeros(num_features, most).masked_scatter_(is_own_FS, lengths_S)
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=lengths_FS.view(-1),
        stride=most,
        length_per_key=features.length_per_key_or_none(),
        offset_per_key=features.offset_per_key_or_none(),
    )
