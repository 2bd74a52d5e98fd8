"""The base of both kinds of sharded modules: their tables, and the features they look up.

A schedule drives the exchange of hot/cold tables. A module that also has stock tables is split by
:meth:`.HotColdModule.split_by_kind` into two modules over the same rows, one with the hot/cold
tables and one with the stock tables; their outputs are joined.

:class:`HotRowRefresher` finds these modules in a model and refreshes their hot sets, under any
training loop.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_picasso._torchrec import EmbeddingShardingContext, EmbeddingShardingInfo
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import FORMS, HotColdParams
from torchrec_picasso.rows.batch_rows import MicroBatchRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.refresh_policy import Refresh
from torchrec_picasso.rows.refresher import Refreshed, Refresher
from torchrec_picasso.rows.valid_features import in_order, valid_features, with_weights
from torchrec_picasso.sharding.delta_tracker import lookup_tracker
from torchrec_picasso.sharding.table_sharding import HotColdEmbeddingSharding

GROUP = "hot_cold"
"""The key of hot/cold tables in TorchRec's dictionary of tables by sharding type."""


def _track(module: HotColdModule, name: str, *given: Any) -> None:
    """Calls a tracker of TorchRec's on a module, if one is registered."""
    record = getattr(module, name)
    if record is not None:
        record(*given)


class HotColdModule(ShardedEmbeddingModule):
    """A sharded module of TorchRec's in which tables with :class:`HotColdParams` are hot/cold.

    These tables form one group with one packed unique exchange, in which a row travels once for any
    number of lookups in the batch; all other tables take TorchRec's own path. Names, state dict and
    fused optimizer are TorchRec's.

    ``table_shardings``, ``with_shardings`` and ``join`` differ between pooled and sequence modules.
    """

    _has_uninitialized_input_dist: bool
    _is_checked = False
    """Whether hot/cold tables look up the same features and report malformed ones to all ranks."""

    @classmethod
    def create_grouped_sharding_infos(
        cls, *args: Any, **kwargs: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """Groups tables by sharding type; hot/cold tables are a group of their own."""
        stock_groups = super().create_grouped_sharding_infos(*args, **kwargs)
        groups: dict[str, list[EmbeddingShardingInfo]] = {}
        for sharding_type, infos in stock_groups.items():
            for info in infos:
                groups.setdefault(GROUP if is_hot_cold(info) else sharding_type, []).append(info)
        return groups

    @abstractmethod
    def table_shardings(self) -> Sequence[Any]:
        """Returns TorchRec's shardings, one per sharding type."""

    @abstractmethod
    def with_shardings(self, positions: Sequence[int]) -> HotColdModule:
        """Copies the module with a subset of its shardings; both modules share the rows. Positions
        ascend. The copy makes its own input dists, with the first batch."""

    @abstractmethod
    def join(self, outputs: Sequence[LazyAwaitable[Any]]) -> LazyAwaitable[Any]:
        """Joins the outputs of the modules that :meth:`split_by_kind` returns, in its order."""

    @property
    def hot_cold_shardings(self) -> list[HotColdEmbeddingSharding]:
        """The sharding of the hot/cold tables, none if there are no such tables."""
        return [s for s in self.table_shardings() if isinstance(s, HotColdEmbeddingSharding)]

    @property
    def has_hot_cold(self) -> bool:
        """Whether any table is hot/cold."""
        return bool(self.hot_cold_shardings)

    @property
    def is_all_hot_cold(self) -> bool:
        """Whether all tables are hot/cold, so that TorchRec exchanges nothing by itself."""
        return self.has_hot_cold and len(self.table_shardings()) == 1

    def output(self, rows: MicroBatchRows) -> LazyAwaitable[Any]:
        """Computes the module's output for one micro-batch, from its fetched rows."""
        context = self.create_context()
        context.sharding_contexts.append(EmbeddingShardingContext())
        return self.compute_and_output_dist(context, [rows])

    def split_by_kind(self) -> tuple[HotColdModule, HotColdModule]:
        """Splits a module with both kinds of tables into hot/cold tables and stock tables."""
        is_hot_cold = [isinstance(s, HotColdEmbeddingSharding) for s in self.table_shardings()]
        hot_cold, stock = (
            self.with_shardings([p for p, kind in enumerate(is_hot_cold) if kind == wanted])
            for wanted in (True, False)
        )
        # malformed features are replaced for both modules; the hot/cold one reports them
        stock._is_checked = True
        return hot_cold, stock

    def _copy_with(self, positions: Sequence[int]) -> Any:
        """Makes a shallow copy with the lookups of some shardings, for :meth:`with_shardings`.

        All that depends on the set of shardings is rebuilt, by the same TorchRec methods as in its
        constructor or, for input dists, with the first batch.
        """
        subset: Any = copy.copy(self)
        # nn.Module writes submodules and buffers into these dictionaries: the copy gets its own
        vars(subset).update(_buffers=dict(subset._buffers), _modules=dict(subset._modules))
        subset._lookups = [self._lookups[p] for p in positions]
        subset._sharding_types = [self._sharding_types[p] for p in positions]
        subset._has_uninitialized_input_dist = True
        subset._input_dists, subset._output_dists = [], []
        subset._feature_splits, subset._features_order = [], []
        # TorchRec may register trackers later: a copy calls those of the module
        for name in ("post_lookup_tracker_fn", "post_odist_tracker_fn"):
            setattr(subset, name, partial(_track, self, name))
        return subset

    # dynamo cannot trace messages; if TorchRec is compiled as well, the graph breaks here
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """TorchRec's forward, outside compiled graphs. Collective."""
        return super().forward(*args, **kwargs)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Replaces malformed features, then starts TorchRec's input dist. Collective."""
        if self.has_hot_cold or self._is_checked:
            features = valid_features(maybe_td_to_kjt(features, None))
            for sharding in self.hot_cold_shardings:
                sharding.request_dist.validated = [features]
        return super().input_dist(ctx, features)

    def register_post_lookup_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """Registers TorchRec's delta tracker; see ``delta_tracker.py``."""
        for sharding, lookup in zip(self.table_shardings(), self._lookups):
            if isinstance(sharding, HotColdEmbeddingSharding):
                record_fn = lookup_tracker(record_fn, sharding.group, list(lookup._emb_modules))
        super().register_post_lookup_tracker_fn(record_fn)

    @property
    def group(self) -> RowGroup:
        """The tables of a module whose tables are all hot/cold."""
        (sharding,) = self.table_shardings()
        return sharding.group

    def features_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Selects the features that the module looks up, in the order of its tables. Lengths of the
        module's input must be valid."""
        if self._has_uninitialized_input_dist:
            self._create_input_dist(features.keys())
            self._has_uninitialized_input_dist = False
        # sequences are not pooled, so weights have no use
        if features.weights_or_none() is not None and not self.group.plan.has_pooling:
            features = with_weights(features, None)
        order, num_features = self._features_order, sum(self.group.plan.features_M)
        with torch.no_grad():
            if order != list(range(len(order))):
                features = in_order(features, order, self.get_buffer("_features_order_tensor"))
        if len(features.keys()) == num_features:
            return features
        # features already in table order may be followed by some without a table
        (own,) = features.split([num_features])
        return own


def is_hot_cold(info: EmbeddingShardingInfo) -> bool:
    """Whether the plan makes a table hot/cold; PlanError if its sharding type is not its form's."""
    sharding = info.param_sharding
    if not isinstance(sharding.cache_params, HotColdParams):
        return False
    form = sharding.cache_params.form
    expected = FORMS[form].sharding_type
    if sharding.sharding_type != expected:
        raise PlanError(
            f"table {info.embedding_config.name!r} carries HotColdParams(form={form!r}) but is "
            f"placed {sharding.sharding_type!r}; hot/cold tables of this form are placed "
            f"{expected!r}"
        )
    return True


class HotRowRefresher:
    """Updates the hot rows of a model to what it looks up, under any pipeline.

    The constructor starts the counting of accesses. In-flight batches of a pipeline get a new
    layout when they are looked up. :class:`~torchrec_picasso.InterleavedTrainPipeline` refreshes by
    itself if it gets ``refresh``.

    Args:
        model: ``DistributedModelParallel``, or any model with hot/cold tables.
        refresh: Interval and thresholds of refreshes; ``None`` = the defaults.
    """

    def __init__(self, model: nn.Module, refresh: Refresh | None = None) -> None:
        modules = [module for module in model.modules() if isinstance(module, HotColdModule)]
        self._groups = [each.group for module in modules for each in module.hot_cold_shardings]
        self._refresher = Refresher(self._groups, refresh or Refresh())

    def step(self) -> Refreshed | None:
        """Ends a training step, and returns the result of a refresh evaluation; ``None`` in steps
        without one. Collective: all ranks call it after each of their steps."""
        found = self._refresher.step()
        if found is not None and found.num_moved:
            # rows moved; a pipeline may read them on a stream that is not known here
            for device in {group.device for group in self._groups if group.device.type != "cpu"}:
                torch.get_device_module(device).synchronize()
        return found

    def hot_rows(self) -> dict[str, Tensor]:
        """The hot rows by table name, int64, ascending; tables without hot rows are left out."""
        return {name: rows for group in self._groups for name, rows in group.hot_rows.items()}
