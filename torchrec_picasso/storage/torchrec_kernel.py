"""TorchRec's kernel interface: state dicts, parameters and a fused optimizer over the home rows.

Home rows are stock row-wise shards and never outdated, so state dicts are those of plain TorchRec.

Users get views of home rows. torch counts writes into a tensor and its views in a version counter.
``.data`` of a tensor shares the memory but has its own counter, so a write through it would not be
detected. Here ``.data`` is a view of one tensor that the storage keeps and whose counter it checks;
the view may be taken at any time and kept for any time. Writes through ``.data`` of derived tensors
(``parameter.detach().data``), through numpy or a storage, and through ``.data`` of optimizer state
are not detected.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
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
from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.storage.row_storage import RowStorage


class HotColdKernel(BaseEmbedding, FusedOptimizerModule):
    """One pack on this rank as a TorchRec kernel."""

    def __init__(self, config: GroupedEmbeddingConfig, rows: RowStorage, ranks: Ranks) -> None:
        super().__init__()
        self._config = config
        self._ranks = ranks
        self._dim = config.embedding_tables[0].local_cols
        self.rows = rows
        for table, weights in zip(config.embedding_tables, self.split_embedding_weights()):
            weights.uniform_(table.get_weight_init_min(), table.get_weight_init_max())
        self._optim = _OrderedFusedOptimizer(self.rows, **self._optimizer_views())

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """The pack's tables on this rank."""
        return self._config

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        """Optimizer over the home rows, with the keys of stock TorchRec."""
        return self._optim

    def forward(self, features: Any) -> Tensor:
        """Refuses a lookup: :class:`.BatchRows` fetches rows, and the asking rank pools them."""
        raise CompatError("HotColdKernel has no forward; the sharded module fetches its rows")

    def split_embedding_weights(self) -> list[Tensor]:
        """Home rows of each table, views, shape ``(local_rows, D)``."""
        return self._home_slices(self.rows.tables.weights.homes)

    @property
    def table_names(self) -> list[str]:
        """Names of the tables, in the order of their home rows."""
        return [table.name for table in self._config.embedding_tables]

    def split_first_state(self) -> Iterator[Tensor]:
        """Yields the first per-row optimizer state of each table's home rows, as views. Yields
        nothing for an optimizer without such a state. Call :meth:`flush` before."""
        for rows in list(self.rows.tables.row_states.values())[:1]:
            yield from self._home_slices(rows.homes)

    def split_rows(self, rows_n: Tensor) -> Mapping[str, Tensor]:
        """Splits home rows of the pack, int64, ascending, by table. A host sync on CUDA. Rows of a
        table are counted from its first home row on this rank."""
        sizes = [table.local_rows for table in self._config.embedding_tables]
        # Home rows of a table are consecutive in the pack and rows_n ascends: each table is a
        # slice.
        edges = torch.tensor([0, *accumulate(sizes)], device=rows_n.device)
        counts = torch.searchsorted(rows_n, edges).diff().tolist()
        pieces = zip(self.table_names, rows_n.split(counts), edges)
        return {name: rows - start for name, rows, start in pieces}

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Home rows as ShardedTensors or DTensors, equal to stock row-wise TorchRec's."""
        self.rows.before_reading()
        data = self._home_slices(self.rows.homes_data)
        return get_state_dict(
            self._config.embedding_tables,
            [
                # The entry is a view of the rows; its .data is the view whose writes the storage
                # counts.
                view.as_subclass(_HomeRows).with_data(same)
                for view, same in zip(self.split_embedding_weights(), data)
            ],
            self._ranks.pg,
            OrderedDict() if destination is None else destination,
            prefix,
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Home rows as parameters that no outside optimizer may update."""
        data = self._home_slices(self.rows.homes_data)
        for name, view, same in zip(self.table_names, self.split_embedding_weights(), data):
            parameter: Any = _HomeParameter(view).with_data(same)
            # TorchRec's mark for parameters whose optimizer runs in backward.
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]
            yield append_prefix(prefix, f"{name}.weight"), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields nothing: replicas are not part of the model's state."""
        yield from ()

    def named_parameters_by_table(self) -> Iterator[tuple[str, TableBatchedEmbeddingSlice]]:
        """Home rows as slices of the TBE, each with an optimizer for its own view."""
        flat = self.rows.tables.flat_homes()
        views = self._optimizer_views()
        start = 0
        data = self._home_slices(self.rows.homes_data)
        for table, same in zip(self._config.embedding_tables, data):
            # Range of the table in the TBE's flat buffer, in elements.
            end = start + table.local_rows * self._dim
            weight = _HomeSlice(flat, start, end, table.local_rows, self._dim).with_data(same)
            own = {"create_for_table": table.name, "param_weight_for_table": weight}
            weight._in_backward_optimizers = [_OrderedFusedOptimizer(self.rows, **views, **own)]
            yield table.name, weight
            start = end

    def _home_slices(self, homes: Tensor) -> list[Tensor]:
        """Entries of each table's home rows, as views."""
        sizes = [table.local_rows for table in self._config.embedding_tables]
        return [homes[end - size : end] for size, end in zip(sizes, accumulate(sizes))]

    def _optimizer_views(self) -> Mapping[str, Any]:
        """Returns arguments that restrict TorchRec's fused optimizer to home rows."""
        # One dict of states per table: shared states as they are, per-row states as views.
        states: list[dict[str, Tensor]] = [
            dict(self.rows.tables.shared_states) for _ in self._config.embedding_tables
        ]
        for key, rows in self.rows.tables.row_states.items():
            for views, view in zip(states, self._home_slices(rows.homes)):
                views[key] = view
        return {
            "config": self._config,
            "emb_module": self.rows.tables.tbe,
            "pg": self._ranks.pg,
            "embedding_weights_by_table": self.split_embedding_weights(),
            "all_optimizer_states": states if any(states) else None,
        }

    def flush(self) -> None:
        """Orders the reader of a state dict after the last update. Local."""
        self.rows.before_reading()

    def purge(self) -> None:
        """Does nothing: a load writes into home rows, and version counters detect the write."""


class _OrderedFusedOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's fused optimizer; reads of its state are ordered after the last update."""

    def __init__(self, storage: RowStorage, **arguments: Any) -> None:
        self._storage = storage
        super().__init__(**arguments)

    @property
    def state(self) -> Mapping[Any, Any]:
        self._storage.before_reading()
        return self._home_state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._home_state = state


class _CountedData:
    """A tensor of home rows, paired with the view that its ``.data`` returns."""

    _data: Tensor

    def with_data(self, data: Tensor) -> Any:
        """Sets the view of the same rows whose version counter the storage checks."""
        self._data = data
        return self

    @property
    def data(self) -> Tensor:
        """The rows without their graph; writes are counted."""
        return self._data.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # nn.Module.to assigns converted tensors
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        # Other memory: the rows were moved, so the old view would describe the old memory.
        if value.data_ptr() != self._data.data_ptr():
            self._data = value.detach()


class _HomeSlice(_CountedData, TableBatchedEmbeddingSlice):
    """TorchRec's slice of a TBE, with counted ``.data``."""


class _HomeParameter(_CountedData, nn.Parameter):
    """A parameter that is a view of the home rows."""


class _HomeRows(_CountedData, torch.Tensor):
    """A tensor of a state dict. Results of operations, copies and saved files are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = copy.deepcopy(self.detach(), memo)
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)
