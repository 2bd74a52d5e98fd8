"""Features with other samples than the batch: every feature's own rows, and the way to the samples.

User-side features often come once per user and not once per sample (TorchRec's variable batch per
feature): each feature of a KeyedJaggedTensor has a batch size of its own, and its inverse indices
say which of its rows every sample has. What is looked up and pooled are a feature's own rows, each
once; the output is then spread over the samples. A gradient comes back to a row from all samples
that have it, summed by autograd.

Samples of such features cannot be cut, so the batch is one part.

Shape letters: B samples, F features, N lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import InputError
from torchrec_picasso.rows.batch_rows import PartRows
from torchrec_picasso.rows.cut import filled_up
from torchrec_picasso.sharding.spread import SpreadBags, SpreadSequences

__all__ = ["OddFeatures", "spread"]


class OddFeatures(KeyedJaggedTensor):
    """Features of a module, in the order of its tables, each with a batch size of its own."""

    row_of_sample_FB: Tensor | None
    """Which of a feature's rows every sample has; ``None`` = all features have the same rows, and
    the module's output has these."""

    @staticmethod
    def of(features: KeyedJaggedTensor, given: KeyedJaggedTensor) -> OddFeatures:
        """Makes features odd, whether they are or not; no copy.

        Args:
            features: In the order of the tables.
            given: As the batch has them.

        Raises:
            InputError: If they have a batch size per feature and no inverse indices.
        """
        row_of_sample_FB = None
        if features.variable_stride_per_key():
            row_of_sample_FB = _rows_of_samples(features.keys(), given)
        odd = OddFeatures(
            keys=features.keys(),
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            offsets=features.offsets_or_none(),
            stride_per_key_per_rank=[[stride] for stride in features.stride_per_key()],
        )
        odd.row_of_sample_FB = row_of_sample_FB
        return odd


def _rows_of_samples(keys: Sequence[str], given: KeyedJaggedTensor) -> Tensor:
    inverse = given.inverse_indices_or_none()
    if inverse is None:
        raise InputError(
            f"the KeyedJaggedTensor of features {', '.join(given.keys())} has a batch size per "
            "feature and no inverse_indices, which tell the row of each sample; give it "
            "inverse_indices=(keys, indices of shape (features, samples))"
        )
    place = {key: number for number, key in enumerate(inverse[0])}
    order = [place[key] for key in keys]
    if order == list(range(len(inverse[0]))):
        return inverse[1]
    return inverse[1].index_select(0, torch.tensor(order, device=inverse[1].device))


def spread(module: Any, rows: PartRows) -> LazyAwaitable[Any]:
    """The output of a module that looked up odd features, by samples.

    Args:
        module: Pools bags, or gives sequences.
        rows: Of the whole batch.
    """
    features = rows.rows.layout.features_of[rows.module]
    assert isinstance(features, OddFeatures)
    strides_F, row_FB = features.stride_per_key(), features.row_of_sample_FB
    if module.group.plan.takes_weights:
        return SpreadBags(module.output(rows), strides_F, row_FB)
    padded = _PaddedRows(**{field.name: getattr(rows, field.name) for field in fields(rows)})
    if row_FB is None:
        return module.output(padded)
    starts_F = torch.tensor([0, *accumulate(strides_F[:-1])], device=row_FB.device)
    rows_FB = row_FB + starts_F.unsqueeze(1)
    return SpreadSequences(module.output(padded), features.lengths(), rows_FB)


@dataclass(frozen=True, kw_only=True)
class _PaddedRows(PartRows):
    """Rows of sequences whose features are filled up to one batch size with empty ones."""

    @property
    def features(self) -> KeyedJaggedTensor:
        return filled_up(self.rows.layout.features_of[self.module])
