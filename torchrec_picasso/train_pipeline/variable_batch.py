"""Variable-batch (VBE) features: their own rows are looked up, then expanded to the samples.

User-side features often come once per user and not once per sample (TorchRec's variable batch per
feature): each feature of a KeyedJaggedTensor has its own batch size, and its inverse indices name
each sample's row. The lookup and the pooling work on the feature's own rows, each once; the output
is then expanded to the samples. Autograd sums the gradients of all samples with the same row.

TorchRec's own expansion is exact for bags; sequences are expanded in ``sharding/sharded_ec.py``.

The samples of such features cannot be cut, so the batch stays whole.

Shape letters: B samples, D dim, F features, N lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.ops.streams import keep_for_current_stream
from torchrec_picasso.rows.batch_rows import MicroBatchRows
from torchrec_picasso.rows.valid_features import padded
from torchrec_picasso.sharding.output_dist import LaterByKey
from torchrec_picasso.sharding.sharded_ec import spread_sequences


class VariableBatchFeatures(KeyedJaggedTensor):
    """Features of a module in the order of its tables, each with its own batch size."""

    row_of_sample_FB: Tensor | None
    """Inverse index: each sample's row, counted within its feature; ``None`` = all features have
    the same rows, and so does the module's output."""

    @staticmethod
    def pad(features: KeyedJaggedTensor, given: KeyedJaggedTensor) -> VariableBatchFeatures:
        """Converts features in the order of the tables, without a copy. ``given`` are the features
        as the batch has them, perhaps with inverse indices."""
        row_of_sample_FB = None
        if features.variable_stride_per_key():
            names, row_of_sample_FB = given.inverse_indices()
            order = list(map(names.index, features.keys()))
            if order != list(range(len(names))):  # (F, B) of these features, in their order
                index = torch.tensor(order, device=row_of_sample_FB.device)
                row_of_sample_FB = row_of_sample_FB.index_select(0, index)
        vbe = VariableBatchFeatures(
            keys=features.keys(),
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            offsets=features.offsets_or_none(),
            stride_per_key_per_rank=[[stride] for stride in features.stride_per_key()],
        )
        vbe.row_of_sample_FB = row_of_sample_FB
        return vbe


def check_inverse_indices(given: KeyedJaggedTensor) -> None:
    """Raises CompatError if features have their own batch sizes and no inverse indices."""
    if given.variable_stride_per_key() and given.inverse_indices_or_none() is None:
        raise CompatError(
            f"the KeyedJaggedTensor of features {', '.join(given.keys())} has a batch size per "
            "feature and no inverse_indices, which tell the row of each sample; give it "
            "inverse_indices=(keys, indices of shape (features, samples))"
        )


def spread(module: Any, rows: MicroBatchRows) -> LazyAwaitable[Any]:
    """Computes a module's output from the whole batch's VBE features, expanded to the samples."""
    features = rows.batch_rows.layout.features_by_module[rows.module]
    assert isinstance(features, VariableBatchFeatures)
    strides_F, row_FB = features.stride_per_key(), features.row_of_sample_FB
    if module.group.plan.has_pooling:
        own = module.output(rows)
        return LaterByKey(lambda: _spread_bags(own.wait(), strides_F, row_FB))
    padded = _PaddedRows(**{field.name: getattr(rows, field.name) for field in fields(rows)})
    if row_FB is None:
        return module.output(padded)
    # from rows counted within a feature to rows counted over all features
    starts_F = torch.tensor([0, *accumulate(strides_F[:-1])], device=row_FB.device)
    rows_FB = row_FB + starts_F.unsqueeze(1)
    return spread_sequences(module.output(padded), features.lengths(), rows_FB)


@dataclass(frozen=True, kw_only=True)
class _PaddedRows(MicroBatchRows):
    """Rows of sequences whose features are padded to one batch size with empty sequences."""

    @property
    def features(self) -> KeyedJaggedTensor:
        return padded(self.batch_rows.layout.features_by_module[self.module])


def _spread_bags(
    own: KeyedTensor, strides_F: Sequence[int], row_of_sample_FB: Tensor | None
) -> KeyedTensor:
    """Expands pooled rows of VBE features to one row per sample: ``(B, sum of D)``.

    The values of ``own`` are flat, feature by feature, ``strides_F`` rows each. Without an inverse
    index all features have the batch's samples, and nothing is expanded.
    """
    dims_F = own.length_per_key()
    if row_of_sample_FB is None:
        # flat -> (B, D) per feature -> (B, sum of D)
        blocks_F = own.values().split([rows * dim for rows, dim in zip(strides_F, dims_F)])
        values = torch.cat([block.view(-1, dim) for block, dim in zip(blocks_F, dims_F)], dim=1)
        return KeyedTensor(own.keys(), dims_F, values)
    num_samples = row_of_sample_FB.size(1)
    # one gather for all features: flat and (F B) -> (B, sum of D), by sample
    values = torch.ops.fbgemm.batch_index_select_dim0(
        inputs=own.values(),
        indices=keep_for_current_stream(row_of_sample_FB).reshape(-1),
        input_num_indices=[num_samples] * len(dims_F),
        input_rows=strides_F,
        input_columns=dims_F,
        permute_output_dim_0_1=True,
    )
    return KeyedTensor(own.keys(), dims_F, values.view(num_samples, sum(dims_F)))
