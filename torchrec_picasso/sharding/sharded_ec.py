"""A sharded EmbeddingCollection in which marked tables are hot/cold and the others stock.

A variable-batch (VBE) feature has fewer rows than the batch has samples, and an inverse index that
names each sample's row. For sequences TorchRec's operator that expands the rows to the samples has
no backward on the CPU: tables would not be trained, without an error. Hot/cold sequences are
therefore expanded here, on every device.

Shape letters: B samples, D dim, F features, N lookups, S bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_picasso._torchrec import EmbeddingShardingInfo, QuantizedCommCodecs
from torchrec_picasso.errors import CompatError
from torchrec_picasso.ops.streams import keep_for_current_stream
from torchrec_picasso.sharding.output_dist import Later
from torchrec_picasso.sharding.sharded_module import GROUP, HotColdModule
from torchrec_picasso.sharding.table_sharding import HotColdEmbeddingSharding


class ShardedHotColdEmbeddingCollection(HotColdModule, ShardedEmbeddingCollection):
    """TorchRec's sharded module with one more way to shard a table, see :class:`.HotColdModule`."""

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        if self.is_all_hot_cold:
            self._use_index_dedup = False  # the unique exchange deduplicates, on every device

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> Any:
        """Makes the sharding of one group; the group of hot/cold tables gets this package's."""
        given = sharding_infos, env, device, qcomm_codecs_registry
        if sharding_type != GROUP:
            return super().create_embedding_sharding(sharding_type, *given)
        return HotColdEmbeddingSharding(*given)

    def table_shardings(self) -> Sequence[Any]:
        """Returns TorchRec's shardings, one per sharding type."""
        return list(self._sharding_type_to_sharding.values())

    def with_shardings(self, positions: Sequence[int]) -> ShardedHotColdEmbeddingCollection:
        """Copies the module with a subset of its shardings; both modules share the rows."""
        subset: ShardedHotColdEmbeddingCollection = self._copy_with(positions)
        shardings = list(self._sharding_type_to_sharding.items())
        subset._sharding_type_to_sharding = dict(shardings[p] for p in positions)
        names = self._embedding_names_per_sharding
        subset._embedding_names_per_sharding = [names[p] for p in positions]
        subset._create_output_dist()
        subset._use_index_dedup = self._use_index_dedup and not subset.is_all_hot_cold
        return subset

    def join(
        self, outputs: Sequence[LazyAwaitable[dict[str, JaggedTensor]]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Joins the outputs of the modules that :meth:`split_by_kind` returns, in its order."""
        names = [name for group_names in self._embedding_names_per_sharding for name in group_names]

        def joined() -> dict[str, JaggedTensor]:
            found: dict[str, JaggedTensor] = {}
            for output in outputs:
                found |= output.wait()
            return {name: found[name] for name in names}

        return Later(joined)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Looks up the batch. Collective.

        TorchRec's implementation fails on batches without samples, so it runs only for modules with
        stock tables. Raises CompatError if stock tables would not be trained.
        """
        if not self.is_all_hot_cold:
            _refuse_untrained(ctx, self._device)
            return super().compute_and_output_dist(ctx, input)
        ((lookup, features, output_dist, names),) = zip(
            self._lookups, input, self._output_dists, self._embedding_names_per_sharding
        )
        rows = lookup(features)
        # as TorchRec's own modules call its trackers
        if self.post_lookup_tracker_fn is not None:
            self.post_lookup_tracker_fn(None, rows)
        found = output_dist(rows), rows.features, names, self._need_indices
        own = Later(partial(_by_feature, *found))
        if self.post_odist_tracker_fn is not None:
            self.post_odist_tracker_fn()
        if not ctx.seq_vbe_ctx:
            return own
        # VBE: `own` has a bag per distinct row (S); recat (F B) names the bag of each sample
        (vbe,) = ctx.seq_vbe_ctx
        shape = vbe.reindexed_lengths.shape
        return spread_sequences(own, vbe.unpadded_lengths, vbe.recat.view(shape))


def _refuse_untrained(ctx: EmbeddingCollectionContext, device: torch.device | None) -> None:
    """Refuses stock sequences with a batch size per feature where their backward is missing."""
    if ctx.seq_vbe_ctx and torch.is_grad_enabled() and (device is None or device.type == "cpu"):
        raise CompatError(
            "sequences with a batch size per feature are not trained by TorchRec on the CPU, where "
            "fbgemm::permute_1D_sparse_data has no backward; make all tables of this "
            "EmbeddingCollection hot/cold, or give all its features the batch's samples"
        )


def _by_feature(
    rows: Awaitable[Tensor], features: KeyedJaggedTensor, names: Sequence[str], need_indices: bool
) -> dict[str, JaggedTensor]:
    lookups_F = features.length_per_key()
    ids_F = features.values().split(lookups_F) if need_indices else [None] * len(names)
    rows_F = rows.wait().split(lookups_F)
    lengths_FB = features.lengths().view(len(names), features.stride())
    return {
        name: JaggedTensor(values=rows, lengths=lengths_B, weights=ids)
        for name, rows, lengths_B, ids in zip(names, rows_F, lengths_FB, ids_F)
    }


def spread_sequences(
    own: LazyAwaitable[dict[str, JaggedTensor]], lengths_S: Tensor, row_of_sample_FB: Tensor
) -> LazyAwaitable[dict[str, JaggedTensor]]:
    """Expands sequences of VBE features to one sequence per sample, when they are first used.

    ``own`` has a sequence per row, feature by feature. ``lengths_S`` are the lookups of each bag; a
    bag is a row of a feature. The inverse index names each sample's bag, counted over the bags of
    all features. One host sync on CUDA, for the lookups of each feature.
    """

    def spread() -> dict[str, JaggedTensor]:
        jagged_by_name = own.wait()
        bag_of_sample_FB = keep_for_current_stream(row_of_sample_FB).long()
        # first and last lookup of each bag, then length and first lookup of each sample's bag
        ends_S = lengths_S.cumsum(0)
        lengths_FB = lengths_S[bag_of_sample_FB]
        starts_FB = ends_S[bag_of_sample_FB] - lengths_FB
        found: dict[str, JaggedTensor] = {}
        first = 0
        # the lookups of a feature are counted from its own first one
        for (name, jagged), lengths_B, starts_B, num_lookups in zip(
            jagged_by_name.items(), lengths_FB, starts_FB, lengths_FB.sum(dim=1).tolist()
        ):
            found[name] = _take(jagged, lengths_B, starts_B - first, num_lookups)
            first += jagged.values().size(0)
        return found

    return Later(spread)


def _take(jagged: JaggedTensor, lengths_B: Tensor, starts_B: Tensor, num: int) -> JaggedTensor:
    """Copies from each start the given number of lookups ``(N, D)``, in the order of the samples.
    ``starts_B`` count within ``jagged``; ``num`` is the sum of the lengths."""
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
