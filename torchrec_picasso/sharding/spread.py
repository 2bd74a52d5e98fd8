"""Expands outputs of features with their own batch sizes to the batch's samples.

A variable-batch (VBE) feature has fewer rows than the batch has samples, and an inverse index that
names each sample's row. TorchRec's own expansion is exact for bags. For sequences its operator has
no backward on the CPU: tables would not be trained, without an error. Hot/cold sequences are
therefore expanded here, on every device.

Shape letters: B samples, D columns, F features, N lookups, S bags.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_picasso.ops.streams import keep_for_current_stream

__all__ = ["SpreadBags", "SpreadSequences"]


class SpreadBags(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]):
    """Pooled rows of VBE features, expanded to one row per sample: ``(B, sum of D)``.

    The values of ``own`` are flat, feature by feature, ``rows_F`` rows each. The inverse index
    names each sample's row, counted within its feature; without it all features have the batch's
    samples, and nothing is expanded.
    """

    def __init__(
        self,
        own: LazyAwaitable[KeyedTensor],
        rows_F: Sequence[int],
        row_of_sample_FB: Tensor | None,
    ) -> None:
        super().__init__()
        self._own = own
        self._rows_F = rows_F
        self._row_of_sample_FB = row_of_sample_FB

    def _wait_impl(self) -> KeyedTensor:
        own, rows_F, row_of_sample_FB = self._own.wait(), self._rows_F, self._row_of_sample_FB
        dims_F = own.length_per_key()
        if row_of_sample_FB is None:
            # flat -> (B, D) per feature -> (B, sum of D)
            blocks_F = own.values().split([rows * dim for rows, dim in zip(rows_F, dims_F)])
            values = torch.cat([block.view(-1, dim) for block, dim in zip(blocks_F, dims_F)], dim=1)
            return KeyedTensor(own.keys(), dims_F, values)
        num_samples = row_of_sample_FB.size(1)
        # one gather for all features: flat and (F B) -> (B, sum of D), by sample
        values = torch.ops.fbgemm.batch_index_select_dim0(
            inputs=own.values(),
            indices=keep_for_current_stream(row_of_sample_FB).reshape(-1),
            input_num_indices=[num_samples] * len(dims_F),
            input_rows=rows_F,
            input_columns=dims_F,
            permute_output_dim_0_1=True,
        )
        return KeyedTensor(own.keys(), dims_F, values.view(num_samples, sum(dims_F)))


class SpreadSequences(LazyAwaitable[dict[str, JaggedTensor]]):
    """Sequences of VBE features, expanded to one sequence per sample.

    ``own`` has a sequence per row, feature by feature. ``lengths_S`` are the lookups of each bag; a
    bag is a row of a feature. The inverse index names each sample's bag, counted over the bags of
    all features. One host sync on CUDA, for the lookups of each feature.
    """

    def __init__(
        self,
        own: LazyAwaitable[dict[str, JaggedTensor]],
        lengths_S: Tensor,
        row_of_sample_FB: Tensor,
    ) -> None:
        super().__init__()
        self._own = own
        self._lengths_S = lengths_S
        self._row_of_sample_FB = row_of_sample_FB

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        own, row_of_sample_FB = (
            self._own.wait(),
            keep_for_current_stream(self._row_of_sample_FB).long(),
        )
        # first and last lookup of each bag, then length and first lookup of each sample's bag
        ends_S = self._lengths_S.cumsum(0)
        lengths_FB = self._lengths_S[row_of_sample_FB]
        starts_FB = ends_S[row_of_sample_FB] - lengths_FB
        spread: dict[str, JaggedTensor] = {}
        first = 0
        # the lookups of a feature are counted from its own first one
        for (name, jagged), lengths_B, starts_B, num_lookups in zip(
            own.items(), lengths_FB, starts_FB, lengths_FB.sum(dim=1).tolist()
        ):
            spread[name] = _take(jagged, lengths_B, starts_B - first, num_lookups)
            first += jagged.values().size(0)
        return spread


def _take(jagged: JaggedTensor, lengths_B: Tensor, starts_B: Tensor, num: int) -> JaggedTensor:
    """Copies from each start the given number of lookups ``(N, D)``, in the order of the samples.

    ``starts_B`` count within ``jagged``; ``num`` is the sum of the lengths.
    """
    # source index of output n is n + (start of its sample - sum of the lengths before the sample)
    behind_B = starts_B - (lengths_B.cumsum(0) - lengths_B)
    lookup_N = torch.arange(num, device=lengths_B.device)
    lookup_N += behind_B.repeat_interleave(lengths_B, output_size=num)
    ids_N = jagged.weights_or_none()
    return JaggedTensor(
        values=jagged.values().index_select(0, lookup_N),
        lengths=lengths_B,
        weights=None if ids_N is None else ids_N.index_select(0, lookup_N),
    )
