"""One pack on one rank: homes, replicas as a cache of them, and what TorchRec expects of a kernel.

Homes are stock row-wise shards, so state dicts see plain TorchRec. Replicas are a cache of the
homes with two states:

* *filled*: equal on all ranks; newer than their homes when ``dirty``. ``flush`` copies a rank's own
  hot rows home (local, no communication).
* *stale*: before the first step, after a purge, or when somebody wrote into a home in place, which
  shows in the tensors' version counters. The next lookup fills them again (collective).

Both are rows of one TBE, see ``row_tables.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_picasso._torchrec import (
    BaseEmbedding,
    EmbeddingFusedOptimizer,
    EmptyFusedOptimizer,
    FusedOptimizerModule,
    TableBatchedEmbeddingSlice,
    append_prefix,
    get_state_dict,
)
from torchrec_picasso.errors import CompatError
from torchrec_picasso.storage.exactness import check_exact
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.memory_layout import choose_memory
from torchrec_picasso.storage.row_tables import RowTables

__all__ = ["RowStorage"]


class RowStorage(BaseEmbedding, FusedOptimizerModule):
    """Homes and replicas of one pack on this rank.

    Args:
        config: The pack's tables on this rank, of one dim, compute kernel and optimizer setting.
        hot_homes: Where the hot rows of the pack are at home.
        pg: Process group, for the state dict's metadata and for filling the replicas.
        device: Where the rows go.

    Raises:
        CompatError: If the kernel, the optimizer or the dim cannot be trained exactly.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        hot_homes: HotHomes,
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._config = config
        self._pg = pg
        self._hot_homes = hot_homes
        check_exact(
            config.fused_params or {},
            [table.name for table in config.embedding_tables],
            data_type=config.data_type,
            device=device,
            num_hot_rows=hot_homes.num_hot_rows,
        )
        layout = choose_memory(config, device, hot_homes.num_hot_rows)
        self._tables = RowTables(config, layout, device)
        self._homes, self._replicas = self._tables.weights.homes, self._tables.weights.replicas
        self._marked: Tensor | None = None  # all False between calls of which_are_among
        self._filled_versions: tuple[int, ...] | None = None
        self._dirty = False
        self._optim = _FlushedFusedOptimizer(self, **self._optimizer_views())
        self._init_parameters()
        self._own_versions = self._versions()

    # -- training ------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self._config.embedding_tables[0].local_cols

    def gather(self, rows_n: Tensor) -> Tensor:
        """Reads home rows.

        Args:
            rows_n: Home rows of this storage, integer, shape ``(n,)``, repeats allowed.

        Returns:
            Their weights, float32, shape ``(n, D)``.
        """
        return self._homes.index_select(0, rows_n).float()

    def gather_hot(self, slots_h: Tensor, out_hD: Tensor) -> None:
        """Reads replicas of ``slots_h``, counted from 0 in the pack, into float32 ``out_hD``."""
        if self._replicas.dtype == torch.float32:
            torch.index_select(self._replicas, 0, slots_h, out=out_hD)
        else:
            out_hD.copy_(self._replicas.index_select(0, slots_h))

    def which_are_among(self, rows_n: Tensor, others_m: Tensor) -> Tensor:
        """Which of some home rows are among others too: bool, shape ``(n,)``; O(n + m) time."""
        if self._marked is None:
            self._marked = torch.zeros(
                len(self._homes), dtype=torch.bool, device=self._homes.device
            )
        others_m = others_m.to(torch.int64)
        self._marked.index_fill_(0, others_m, True)
        found_n = self._marked.index_select(0, rows_n)
        self._marked.index_fill_(0, others_m, False)
        return found_n

    def update(self, rows_n: Tensor, hot_slots_h: Tensor, grads_mD: Tensor) -> None:
        """Applies the optimizer once to every row given, and counts one step.

        Args:
            rows_n: Home rows, shape ``(n,)``; gradients of a repeated row are summed first.
            hot_slots_h: Replicas, the same on all ranks, shape ``(h,)``.
            grads_mD: Gradients of the home rows, then of the replicas, shape ``(n + h, D)``.
        """
        self._tables.update(rows_n, hot_slots_h, grads_mD)
        if not len(grads_mD):
            return
        self._dirty = self._dirty or hot_slots_h.numel() > 0
        self._own_versions = self._versions()
        if self._filled_versions is not None:
            self._filled_versions = self._own_versions

    # -- replicas as a cache of the homes ------------------------------------------------------

    def replicas_stale(self) -> bool:
        """Whether the replicas may differ from homes that were written from outside."""
        return self._hot_homes.num_hot_rows > 0 and self._filled_versions != self._versions()

    def written_outside(self) -> bool:
        """Whether rows were written by anybody else since the last call of
        :meth:`accept_writes`, update or fill."""
        return self._own_versions != self._versions()

    def accept_writes(self) -> None:
        """Takes the rows as they are: whoever holds copies of them has them again."""
        self._own_versions = self._versions()

    def fill_replicas(self) -> None:
        """Copies every hot row from its home to all ranks. Collective."""
        self.flush()
        for rows in self._tables.per_row():
            self._hot_homes.broadcast(rows.homes, rows.replicas, self._pg)
        self._dirty = False
        self._filled_versions = self._own_versions = self._versions()

    def flush(self) -> None:
        """Copies this rank's own hot rows and their optimizer state home. Local."""
        if not self._dirty or self._filled_versions is None:
            return
        was_stale, was_written = self.replicas_stale(), self.written_outside()
        for rows in self._tables.per_row():
            self._hot_homes.copy_home(rows.homes, rows.replicas)
        self._dirty = False
        if not was_stale:
            self._filled_versions = self._versions()
        if not was_written:
            self._own_versions = self._versions()

    def purge(self) -> None:
        """Forgets the replicas, after bringing home what they know. Local."""
        self.flush()
        self._filled_versions = None

    def _versions(self) -> tuple[int, ...]:
        return tuple(version for rows in self._tables.per_row() for version in rows.versions())

    # -- what TorchRec expects of a kernel -----------------------------------------------------

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """The pack's tables on this rank."""
        return self._config

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        """Optimizer over the homes, keyed as in stock TorchRec."""
        return self._optim

    def forward(self, features: Any) -> Tensor:
        """Not a lookup: rows are fetched by ``gather`` and pooled where they are used."""
        raise CompatError("RowStorage has no forward; HotColdLookup gathers and exchanges its rows")

    def split_embedding_weights(self) -> list[Tensor]:
        """Home rows of each table, views, shape ``(local_rows, D)``."""
        return [view for _, view in self._home_slices(self._homes)]

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Homes as ShardedTensors or DTensors, exactly stock row-wise TorchRec's."""
        self.flush()
        return get_state_dict(
            self._config.embedding_tables,
            self.split_embedding_weights(),
            self._pg,
            OrderedDict() if destination is None else destination,
            prefix,
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Homes as parameters that no outside optimizer may take."""
        for table, view in zip(self._config.embedding_tables, self.split_embedding_weights()):
            parameter: Any = nn.Parameter(view)
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]
            yield append_prefix(prefix, f"{table.name}.weight"), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """None: replicas are no state of the model."""
        yield from ()

    def named_parameters_by_table(self) -> Iterator[tuple[str, TableBatchedEmbeddingSlice]]:
        """Homes as slices of the TBE, each with an optimizer of its own view."""
        flat = self._tables.flat_homes()
        views = self._optimizer_views()
        start = 0
        for table in self._config.embedding_tables:
            end = start + table.local_rows * self.dim
            weight = TableBatchedEmbeddingSlice(
                data=flat,
                start_offset=start,
                end_offset=end,
                num_embeddings=table.local_rows,
                embedding_dim=self.dim,
            )
            weight._in_backward_optimizers = [
                _FlushedFusedOptimizer(
                    self, **views, create_for_table=table.name, param_weight_for_table=weight
                )
            ]
            yield table.name, weight
            start = end

    def _home_slices(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for table in self._config.embedding_tables:
            yield table.name, tensor[start : start + table.local_rows]
            start += table.local_rows

    def _optimizer_views(self) -> Mapping[str, Any]:
        """The arguments by which TorchRec's fused optimizer sees only homes."""
        states: list[dict[str, Tensor]] = [
            dict(self._tables.shared_states) for _ in self._config.embedding_tables
        ]
        for key, rows in self._tables.row_states.items():
            for views, (_, view) in zip(states, self._home_slices(rows.homes)):
                views[key] = view
        return {
            "config": self._config,
            "emb_module": self._tables.tbe,
            "pg": self._pg,
            "embedding_weights_by_table": self.split_embedding_weights(),
            "all_optimizer_states": states if any(states) else None,
        }

    def _init_parameters(self) -> None:
        for table, weights in zip(self._config.embedding_tables, self.split_embedding_weights()):
            weights.uniform_(table.get_weight_init_min(), table.get_weight_init_max())


class _FlushedFusedOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's fused optimizer whose state is brought home before anybody reads it."""

    def __init__(self, storage: RowStorage, **arguments: Any) -> None:
        self._storage = storage
        super().__init__(**arguments)

    @property
    def state(self) -> Mapping[Any, Any]:
        self._storage.flush()
        return self._home_state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._home_state = state
