"""Computes a batch's requests and header words from its features. Sends nothing.

Invalid input is counted and replaced by harmless values, so that every rank reaches the header,
which reports the error to all ranks.

Shape letters: F features, K parts, N lookups, S bags.

Host syncs per batch on CUDA: one with several routes, for the first lookup of each block, beside
those of the routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import add

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.header import HeaderWords
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.route import Route, RouteFeatures, RouteRequest
from torchrec_picasso.rows.valid_features import are_bad, padded

__all__ = ["BatchIds"]


@dataclass(frozen=True, kw_only=True)
class BatchIds:
    """A batch as the routes read it."""

    features: KeyedJaggedTensor
    """Features of all modules, in the order of the group's tables."""
    features_by_module: Sequence[KeyedJaggedTensor]
    """Features of each module."""
    validated: Sequence[KeyedJaggedTensor]
    """Results of :func:`.valid_features`, in any order."""
    weights_N: Tensor | None
    """Per-sample weights of the whole batch; ``None`` if the batch has none or no table pools."""
    sizes_K: Sequence[int | None]
    """Samples of each micro-batch; ``None`` if every feature has its own batch size."""
    routes: Sequence[RouteRequest]
    """The request of each route."""
    hot_epoch: int
    """Epoch of the hot set that the rows were located with."""
    words: HeaderWords

    @staticmethod
    def read(
        features_by_module: Sequence[KeyedJaggedTensor],
        group: RowGroup,
        sizes_K: Sequence[int] | None = None,
        has_data: bool = True,
        validated: Sequence[KeyedJaggedTensor] = (),
    ) -> BatchIds:
        """Reads a batch.

        Args:
            features_by_module: Features that each module looks up, in its lookup order, with valid
                lengths.
            group: The tables of these modules.
            sizes_K: Samples of each micro-batch; ``None`` = one micro-batch.
            has_data: False for a placeholder after the end of this rank's data.
            validated: The results of :func:`.valid_features` for the batch, in any order; the
                header reports the lengths that were malformed before.
        """
        features = group.in_one(features_by_module)
        is_variable = features.variable_stride_per_key()
        if is_variable and any(route.needs_one_batch_size for route in group.routes):
            features, is_variable = padded(features), False
        assert not is_variable or sizes_K is None, "samples of different features cannot be cut"
        one_size = None if is_variable else features.stride()
        sizes = [one_size] if sizes_K is None else sizes_K
        weights_N = features.weights_or_none() if group.plan.takes_weights else None
        by_route = _by_route(features, weights_N, sizes, group.routes)
        requests = [route.read(own) for route, own in zip(group.routes, by_route)]
        return BatchIds(
            features=features,
            features_by_module=features_by_module,
            validated=validated,
            weights_N=weights_N,
            sizes_K=sizes,
            routes=requests,
            hot_epoch=group.hot_epoch,
            words=HeaderWords(
                routes=[request.words for request in requests],
                outside_ids=reduce(add, [request.outside_ids for request in requests]),
                bad_weights=_count_bad_weights(weights_N, features.values().device),
                bad_lengths=are_bad(validated),
                has_data=has_data,
                looks_up_nothing=not features.values().numel(),
            ),
        )


def _by_route(
    features: KeyedJaggedTensor,
    weights_N: Tensor | None,
    sizes_K: Sequence[int | None],
    routes: Sequence[Route],
) -> Iterator[RouteFeatures]:
    """Yields the features of each route, which follow each other in the batch."""
    values_N, lengths_S, offsets_S1 = features.values(), features.lengths(), features.offsets()
    strides_F = features.stride_per_key()
    features_of_blocks = [num for route in routes for num in route.features_of_blocks]
    # First bag of each feature, then of each block, on the host.
    bag_at = [0, *accumulate(strides_F)]
    edges = [bag_at[feature] for feature in accumulate(features_of_blocks, initial=0)]
    lookup_at = [0, values_N.numel()]
    if len(features_of_blocks) > 1:
        on_device = torch.tensor(edges).to(offsets_S1.device, non_blocking=True)
        lookup_at = offsets_S1.index_select(0, on_device).tolist()
    block = feature = 0
    for route in routes:
        end_block = block + len(route.features_of_blocks)
        end_feature = feature + route.num_features
        bags = slice(edges[block], edges[end_block])
        lookups = slice(lookup_at[block], lookup_at[end_block])
        yield RouteFeatures(
            values_N=_part(values_N, lookups),
            lengths_S=_part(lengths_S, bags),
            offsets_S1=_part(offsets_S1, slice(bags.start, bags.stop + 1)),
            first_lookup=lookups.start,
            weights_N=weights_N,
            strides_F=strides_F[feature:end_feature],
            sizes_K=sizes_K,
            lookups_of_blocks=[
                end - start for start, end in pairwise(lookup_at[block : end_block + 1])
            ],
        )
        block, feature = end_block, end_feature


def _part(values: Tensor, where: slice) -> Tensor:
    return values if where == slice(0, len(values)) else values[where]


def _count_bad_weights(weights_N: Tensor | None, device: torch.device) -> Tensor:
    if weights_N is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.isfinite(weights_N).logical_not().sum()
