"""Initial weights of tables that do not depend on the placement.

Each table's weights come from a seed of its own and are written into the shards of a placement, so
two placements start bitwise identical and no rank holds a whole model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import nn
from torchrec.distributed.types import ShardedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

_TABLE_KEY = re.compile(r"\.(embedding_bags|embeddings)\.")


def write_initial_tables(
    sharded: nn.Module, tables: Sequence[BaseEmbeddingConfig], seed: int
) -> None:
    """Initialises tables uniformly in +-1/sqrt(rows), as TorchRec does. Holds one table at a time.

    Args:
        sharded: A ``DistributedModelParallel``.
        tables: Tables of the model before sharding, see :func:`.tables_of`.
        seed: Seed of the run.

    Raises:
        KeyError: If the model lacks one of the tables.
    """
    state = sharded.state_dict()
    keys = {key.split(".")[-2]: key for key in state if _TABLE_KEY.search(key)}
    for index, table in enumerate(tables):
        generator = torch.Generator().manual_seed(seed * 100_003 + index)
        bound = 1.0 / math.sqrt(table.num_embeddings)
        rows = torch.empty(table.num_embeddings, table.embedding_dim)
        rows.uniform_(-bound, bound, generator=generator)
        value = state[keys[table.name]]
        if not isinstance(value, ShardedTensor):
            value.copy_(rows)
            continue
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            num_rows, num_columns = shard.metadata.shard_sizes
            block = rows[row : row + num_rows, column : column + num_columns]
            shard.tensor.detach().copy_(block)
    sharded.load_state_dict(state)  # load hooks write replicas too
