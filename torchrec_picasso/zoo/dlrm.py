"""TorchRec's DLRM from a configuration, with initial weights that no placement can change.

Each table's first weights come from a seed of its own and are written into whatever shards a
placement made, so two placements start bit-equal without ever holding a whole model twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_picasso.config import ModelConfig
from torchrec_picasso.zoo.tables import NUM_DENSE, TableSpec

__all__ = ["build_dlrm", "initial_rows", "write_initial_tables"]

_OF_TABLE = re.compile(r"\.(embedding_bags|embeddings)\.")


def build_dlrm(model: ModelConfig, tables: Sequence[TableSpec], seed: int) -> DLRMTrain:
    """A DLRM with its loss, tables on the meta device, towers initialised from ``seed``.

    Args:
        model: Widths.
        tables: One feature per table.
        seed: Seed of the towers' weights.
    """
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=model.embedding_dim,
                num_embeddings=table.num_embeddings,
                feature_names=[table.feature],
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dlrm = DLRM(
            embedding_bag_collection=collection,
            dense_in_features=NUM_DENSE,
            dense_arch_layer_sizes=[*model.dense_layers, model.embedding_dim],
            over_arch_layer_sizes=[*model.over_layers, 1],
            dense_device=torch.device("cpu"),
        )
    return DLRMTrain(dlrm)


def initial_rows(table: TableSpec, index: int, embedding_dim: int, seed: int) -> Tensor:
    """First weights of one table: uniform in +-1/sqrt(rows), as TorchRec initialises tables.

    Args:
        table: The table.
        index: Its position in the model; tables of equal size differ by it.
        embedding_dim: Columns.
        seed: Seed of the run.

    Returns:
        Float32 weights, shape ``(num_embeddings, embedding_dim)``, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + index)
    bound = 1.0 / math.sqrt(table.num_embeddings)
    rows = torch.empty(table.num_embeddings, embedding_dim)
    return rows.uniform_(-bound, bound, generator=generator)


def write_initial_tables(
    sharded: nn.Module,
    tables: Sequence[TableSpec],
    embedding_dim: int | Sequence[int],
    seed: int,
) -> None:
    """Writes :func:`initial_rows` into the local shards of a sharded model.

    Costs one whole table of memory at a time.

    Args:
        sharded: A ``DistributedModelParallel``, as over :func:`build_dlrm`; of bags or sequences.
        tables: The tables of the model.
        embedding_dim: Columns, of all tables or of each.
        seed: Seed of the run.

    Raises:
        KeyError: If the model has no such table.
    """
    state = sharded.state_dict()
    keys = {key.split(".")[-2]: key for key in state if _OF_TABLE.search(key)}
    dims_T = [embedding_dim] * len(tables) if isinstance(embedding_dim, int) else embedding_dim
    for index, (table, dim) in enumerate(zip(tables, dims_T, strict=True)):
        rows = initial_rows(table, index, dim, seed)
        value = state[keys[table.name]]
        if not isinstance(value, ShardedTensor):
            value.copy_(rows)
            continue
        for shard in value.local_shards():
            (row, column), (num_rows, num_columns) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            block = rows[row : row + num_rows, column : column + num_columns]
            shard.tensor.detach().copy_(block)
    sharded.load_state_dict(state)  # through the hooks, so that replicas follow their homes
