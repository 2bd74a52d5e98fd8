"""Owner-side pooling: ids go to the rank that stores the table, one pooled vector per bag returns.

Each table is stored whole on one home rank, and features are ordered by pack and home rank, so the
lookups for one home rank are a slice. The ids are neither sorted nor made unique: a home rank pools
all lookups. It receives ids by rank, then feature, and reorders them to the order in which bags are
pooled and sent: by micro-batch, rank, sample and feature. A bag counts as a dirty row: all
bags wait for the update. A rank receives its bags by micro-batch and home rank. The block of a home
rank is ordered by sample, so it already is a slice of the pooled output's columns:

    one micro-batch of a pack's matrix:   | home 0: (n, F_0 D) | home 1: (n, F_1 D) | ...

Header words of a pair of ranks: K numbers of samples, and A K numbers of lookups.

Shape letters: A packs of bags, F features, K micro-batches, W ranks, S bags, N lookups, X words,
D dim.

Host syncs per batch on CUDA: none, the numbers of lookups come with the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.header import ReceivedWords, RouteWords
from torchrec_picasso.exchange.packed import Payload
from torchrec_picasso.ops.bags import incoming_bag_order, reorder_bags, segment_edges
from torchrec_picasso.ops.id_reader import PreparedIds
from torchrec_picasso.ops.ids import shift_rows
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.row_order import FIRST_DIRTY, ExchangeSplits, all_dirty
from torchrec_picasso.ops.segment_reduction import mean_scale, mean_weights
from torchrec_picasso.ops.streams import kept_by_stream
from torchrec_picasso.placement import owner_pooled_waves
from torchrec_picasso.rows.route import (
    IncomingRequests,
    PackLayout,
    Pooling,
    Route,
    RouteLayout,
    RouteRequest,
)
from torchrec_picasso.storage.row_storage import RowStorage, TouchedHot, UsedHot

_WEIGHTS_LEFT = (
    "per-sample weights changed between the input dist and the lookup (as by a feature processor), "
    "but some tables are hot/cold with form='bags', whose homes have the weights by then; use "
    "form='rows' for them"
)


class PooledRoute(Route):
    """Tables whose bags are pooled by home ranks. Arguments as for :class:`Route`."""

    name = "bags"
    shares_rows = False  # a bag is of one sample
    needs_one_batch_size = True  # home ranks get one number of samples per rank

    def __post_init__(self) -> None:
        super().__post_init__()
        num_packs = self.space.num_packs
        # Waves of about equal numbers of packs, and a matrix for each pack.
        self.plan = PackPlan.build(self.tables, self.device, owner_pooled_waves(num_packs))
        # The home rank is the one that stores rows of the table.
        rows_by_rank = [list(map(bool, table.block_rows_W)) for table in self.tables]
        homes = [(t.pack, rows_W.index(True)) for t, rows_W in zip(self.tables, rows_by_rank)]
        assert homes == sorted(homes), "tables of one home must be side by side"
        self.features_by_home = [[0] * self.ranks.size for _ in range(num_packs)]
        """Number of features that each rank pools, by pack and rank."""
        for table, (pack, home) in zip(self.tables, homes):
            self.features_by_home[pack][home] += len(table.feature_names)
        nums = torch.tensor(self.features_by_home).view(-1)
        self.home_F = torch.arange(len(nums)).repeat_interleave(nums).to(self.device)
        """Pack and home rank of each feature, as ``pack * W + rank``, int64."""
        ids_F2 = self.space.feature_ids_F2
        _, first_F = self.space.find_blocks(ids_F2[:, 0].contiguous())
        self.rows_F2 = ids_F2 + (first_F - ids_F2[:, 0]).unsqueeze(1)
        """First and last row of each feature's table in its home rank's storage, int64."""
        self.incoming_order = kept_by_stream(incoming_bag_order, maxsize=num_packs)
        """The permutation of incoming bags, kept for the packs of one batch."""

    def check(self, features: KeyedJaggedTensor) -> None:
        """Refuses weights that require gradients, which home ranks that apply them cannot give."""
        weights_N = features.weights_or_none()
        if weights_N is not None and weights_N.requires_grad:
            raise CompatError(
                f"the per-sample weights of features {', '.join(features.keys())} want gradients, "
                "and some of their tables are hot/cold with form='bags', whose weights leave this "
                "rank; use form='rows' for these tables, as hot_cold_planner(hot_rows=0) does, or "
                "weights.detach()"
            )

    def read(
        self,
        features: KeyedJaggedTensor,
        sizes_K: Sequence[int | None],
        prepared: PreparedIds | None = None,
    ) -> _Request:
        """Splits the lookups of a batch by pack and home rank; takes nothing prepared."""
        values_N, weights_N = features.values(), features.weights_or_none()
        sizes = [size for size in sizes_K if size is not None]
        num_packs, num_ranks, num_micro_batches = self.space.num_packs, self.ranks.size, len(sizes)
        # First lookup of each (feature, micro-batch), and N: the host does not know them.
        edges = segment_edges(features.offsets(), sizes * len(self.home_F))
        # Row of the table plus the table's first row in the home rank's storage, shape (N,).
        ends_F = edges[num_micro_batches::num_micro_batches].contiguous()
        rows_N, outside_ids = shift_rows(values_N, ends_F, self.rows_F2, torch.int64)
        # Lookups by pack, home rank and micro-batch: this rank needs all, each home its own.
        lookups_FK = torch.diff(edges).to(torch.int64).view(-1, num_micro_batches)
        lookups = lookups_FK.new_zeros(num_packs * num_ranks, num_micro_batches)
        lookups_AWK = lookups.index_add_(0, self.home_F, lookups_FK).view(
            num_packs, num_ranks, num_micro_batches
        )
        samples_K = torch.tensor(sizes).to(values_N.device, non_blocking=True)
        return _Request(
            # Messages to home ranks, shape (W, K) and (W, A K).
            words=RouteWords(
                [
                    samples_K.expand(num_ranks, -1),
                    lookups_AWK.transpose(0, 1).reshape(num_ranks, -1),
                ],
                host_numbers=[lookups_AWK.view(-1)],
            ),
            outside_ids=outside_ids,
            route=self,
            sizes_K=sizes,
            rows_N=rows_N,
            lengths_A=features.lengths().split(
                [sum(sizes) * num_features for num_features in self.plan.features_M]
            ),
            weights_N=None if weights_N is None else weights_N.float(),
        )


@dataclass(kw_only=True)
class _Request(RouteRequest):
    """The request for the pooled bags of one batch."""

    route: PooledRoute
    sizes_K: Sequence[int]
    rows_N: Tensor
    """Home row of each lookup, int64."""
    lengths_A: Sequence[Tensor]
    weights_N: Tensor | None
    _incoming_AK: Sequence[Sequence[int]] = field(init=False)
    """Number of lookups that this rank pools, by pack and micro-batch."""
    _samples_WK: tuple[tuple[int, ...], ...] = field(init=False)
    _received_A: list[list[Tensor]] = field(init=False, default_factory=list)

    def row_number_payloads(self, words: ReceivedWords, dtype: torch.dtype) -> list[Payload]:
        (samples_WK, lookups_WX), (own_n,) = words
        self._samples_WK = tuple(map(tuple, samples_WK.tolist()))
        num_ranks, num_micro_batches = samples_WK.shape
        lookups_WAK = lookups_WX.reshape(num_ranks, -1, num_micro_batches)
        self._incoming_AK = lookups_WAK.sum(0).tolist()
        incoming_AW = lookups_WAK.sum(2).T.tolist()
        lookups_AW = own_n.reshape(-1, num_ranks, num_micro_batches).sum(2)
        lookups_A = lookups_AW.sum(1).tolist()
        rows_A, weights_A = self.rows_N.split(lookups_A), None
        if self.weights_N is not None:
            weights_A = self.weights_N.split(lookups_A)
        payloads: list[Payload] = []
        for p, features_W in enumerate(self.route.features_by_home):
            lookups_W, incoming_W = lookups_AW[p].tolist(), incoming_AW[p]
            own_features = features_W[self.route.ranks.rank]
            # One entry (sent, sent_W, received_W) per vector. Lengths: one per (sample, feature).
            vectors = [
                (rows_A[p], lookups_W, incoming_W),
                (
                    self.lengths_A[p],
                    [sum(self.sizes_K) * features for features in features_W],
                    [sum(sizes_K) * own_features for sizes_K in self._samples_WK],
                ),
            ]
            if weights_A is not None:
                # float32 weights are sent as their bits in the integer payload.
                bits = weights_A[p].contiguous().view(torch.int32)
                vectors.append((bits, lookups_W, incoming_W))
            own = [
                Payload(sent.to(dtype), sent_W, sent.new_empty(sum(got_W), dtype=dtype), got_W)
                for sent, sent_W, got_W in vectors
            ]
            self._received_A.append([payload.received for payload in own])
            payloads += own
        return payloads

    def lookups_by_home(self) -> Tensor:
        """Counts this rank's lookups by home rank, int64, ``(W,)``."""
        (lookups_AWK,) = self.words.host_numbers
        num_ranks = self.route.ranks.size
        return lookups_AWK.view(-1, num_ranks, len(self.sizes_K)).sum((0, 2))

    def build_layout(self, first_matrix: int) -> RouteLayout:
        plan, features_AW = self.route.plan, self.route.features_by_home
        layouts = [self._pack_layout(p, first_matrix + p) for p in range(plan.num_packs)]
        edges_K1 = [*accumulate(self.sizes_K, initial=0)]
        pooling_KM: list[list[Pooling]] = [
            [
                _PooledBags(
                    num_pieces=sum(map(bool, features_W)),
                    features_W=features_W,
                    dim=dim,
                    # One vector per (sample, feature): n samples take n F rows.
                    vectors=slice(start * sum(features_W), end * sum(features_W)),
                    size=end - start,
                    has_weights=self.weights_N is not None,
                )
                for features_W, dim in zip(features_AW, plan.dim_M)
            ]
            for start, end in pairwise(edges_K1)
        ]
        return layouts, pooling_KM

    def _pack_layout(self, p: int, matrix: int) -> PackLayout:
        requests = self._incoming_bags(p)
        nothing = requests.home_row_numbers_n.new_empty(0)
        features_W = self.route.features_by_home[p]
        bags_KW = [[size * features for features in features_W] for size in self.sizes_K]
        return PackLayout(
            matrix=matrix,
            start=0,
            used=UsedHot(slots_h=nothing, positions_h=nothing),
            touched=TouchedHot(slots_t=nothing, own_slots_o=nothing, own_rows_o=nothing),
            wanted=ExchangeSplits(bags_KW),
            wanted_by_fetch=all_dirty(bags_KW),
            # Gradients are sent by chunk: without the (empty) exchange of clean rows.
            served=ExchangeSplits(requests.served_by_fetch.counts_EW[FIRST_DIRTY:]),
            requests=requests,
        )

    def _incoming_bags(self, p: int) -> _IncomingBags:
        """Builds the incoming requests of pack ``p`` from the received ids."""
        mean_F, rank = self.route.plan.mean_MF[p], self.route.ranks.rank
        rows, lengths, *weight_bits = self._received_A[p]
        *_, first, end = accumulate(self.route.features_by_home[p][: rank + 1], initial=0)
        num_features = end - first
        # From (rank, feature, sample) order to (micro-batch, rank, sample, feature) order.
        order_S = self.route.incoming_order(self.route.device, num_features, self._samples_WK)
        source_N = torch.arange(rows.numel(), device=rows.device) if weight_bits else None
        home_row_numbers_n, ordered = reorder_bags(rows.to(torch.int64), lengths, order_S, source_N)
        weights_N = None
        if weight_bits:
            assert ordered.source_N is not None
            given_N = weight_bits[0].to(torch.int32).view(torch.float32)
            weights_N = given_N.index_select(0, ordered.source_N)
        # Bags by micro-batch and rank; zip transposes the samples from (W, K) to (K, W).
        samples_KW = zip(*self._samples_WK)
        counts_KW = [[size * num_features for size in sizes_W] for sizes_W in samples_KW]
        served_by_fetch = all_dirty(counts_KW)
        mean_scale_S = None
        if mean_F is not None:
            # A flag per bag: the features of this home rank, repeated for each rank's samples.
            mean_S = mean_F[first:end].repeat(sum(map(sum, self._samples_WK)))
            if weights_N is None:
                mean_scale_S = mean_scale(torch.diff(ordered.offsets_S1).float(), mean_S)
            else:
                weights_N = mean_weights(weights_N, ordered.offsets_S1, mean_S, rows.numel())
        return _IncomingBags(
            home_row_numbers_n=home_row_numbers_n,
            offsets_S1=ordered.offsets_S1,
            weights_N=weights_N,
            mean_scale_S=mean_scale_S,
            served_by_fetch=served_by_fetch,
            # Nothing is fetched ahead: exchange 0 is empty.
            lookups_E1=[0, *accumulate(self._incoming_AK[p], initial=0)],
        )


@dataclass(frozen=True, kw_only=True)
class _IncomingBags(IncomingRequests):
    """Incoming requests for pooled bags, ordered by micro-batch, rank, sample and feature. There is
    a home row per lookup, int64."""

    sends_rows = False

    offsets_S1: Tensor
    """First lookup of each bag, and N, int64, shape ``(S + 1,)``."""
    weights_N: Tensor | None
    """Weight of each lookup, including the divisor of a mean; ``None`` = ones."""
    mean_scale_S: Tensor | None
    """Factor of each bag's sum, where bags are averaged without weights; ``None`` = ones."""
    lookups_E1: Sequence[int]
    """First lookup of each exchange; the last entry is N; on the host."""

    @staticmethod
    def joined(batches: Sequence[_IncomingBags]) -> _IncomingBags:
        starts = accumulate((own.home_row_numbers_n.numel() for own in batches), initial=0)
        # Shift each batch's offsets by the lookups before it and drop its end, which is the next
        # batch's start; the end of the last batch is appended below.
        offsets = [incoming.offsets_S1[:-1] + start for incoming, start in zip(batches, starts)]
        rows_N = torch.cat([incoming.home_row_numbers_n for incoming in batches])
        end = offsets[0].new_full((1,), rows_N.numel())
        weights = [own.weights_N for own in batches if own.weights_N is not None]
        scales = [own.mean_scale_S for own in batches if own.mean_scale_S is not None]
        return _IncomingBags(
            home_row_numbers_n=rows_N,
            offsets_S1=torch.cat([*offsets, end]),
            weights_N=torch.cat(weights) if weights else None,
            mean_scale_S=torch.cat(scales) if scales else None,
            served_by_fetch=ExchangeSplits([[sum(map(len, offsets))]]),
            lookups_E1=(0, rows_N.numel()),
        )

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        bags = self.served_by_fetch.slice_of(exchange)
        lookups = slice(*self.lookups_E1[exchange:][:2])
        # An exchange is a slice of bags and of lookups; offsets count from its first lookup.
        offsets_S1 = self.offsets_S1[bags.start : bags.stop + 1] - lookups.start
        weights_N = None if self.weights_N is None else self.weights_N[lookups]
        sums_SD = storage.pool(self.home_row_numbers_n[lookups], offsets_S1, weights_N)
        return self._scaled(sums_SD, bags)

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        # A mean's divisor scales the bag's gradient as it scaled the sum in forward.
        grads_SD = self._scaled(grads_mD, slice(len(grads_mD)))
        storage.update(
            self.home_row_numbers_n, touched, grads_SD, (self.offsets_S1, self.weights_N)
        )

    def _scaled(self, sums_SD: Tensor, bags: slice) -> Tensor:
        """Converts the sums of some bags to averages, in place."""
        scale_S = self.mean_scale_S
        return sums_SD if scale_S is None else sums_SD.mul_(scale_S[bags].unsqueeze(1))


@dataclass(frozen=True, kw_only=True)
class _PooledBags(Pooling):
    """The bags of one micro-batch in their matrix, pooled by their home ranks.

    There is a piece per home rank that pools features, a view ``(n, F_w D)`` of the matrix: columns
    of the output. Home ranks applied all scales.
    """

    gives_views = True

    features_W: Sequence[int]
    """Number of features that each rank pools."""
    dim: int
    vectors: slice
    size: int
    """Samples of the micro-batch."""
    has_weights: bool
    """Whether home ranks received weights."""

    def scales(self, weights_N: Tensor | None, are_new: bool) -> None:
        if are_new and self.has_weights:
            raise CompatError(_WEIGHTS_LEFT)

    def pool(self, rows_RD: Tensor, scales_N: Tensor | None) -> list[Tensor]:
        return self._blocks(rows_RD[self.vectors])

    def gradients(self, grads: Sequence[Tensor], scales_N: Tensor | None) -> Tensor:
        num_bags = self.vectors.stop - self.vectors.start
        grads_SD = torch.empty(num_bags, self.dim, dtype=torch.float32, device=grads[0].device)
        # Each block is a view of grads_SD, shape (n, F_w D), so the copies fill grads_SD.
        for block, grad in zip(self._blocks(grads_SD), grads):
            block.copy_(grad)
        return grads_SD

    def add_gradients(self, sums_RD: Tensor, grads_nD: Tensor) -> None:
        # Bags of different micro-batches are disjoint slices, so they need no sum.
        sums_RD[self.vectors] = grads_nD

    def _blocks(self, vectors_SD: Tensor) -> list[Tensor]:
        # (n F, D) is the concatenation of one (n F_w, D) block per home rank. A block is ordered by
        # sample, then feature, so it reshapes to (n, F_w D) without a copy.
        edges = [self.size * features for features in accumulate(self.features_W, initial=0)]
        return [
            vectors_SD[start:end].view(self.size, features * self.dim)
            for (start, end), features in zip(pairwise(edges), self.features_W)
            if features
        ]
