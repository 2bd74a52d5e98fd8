"""A model of pooled and sequence tables that trains the same on any number of ranks.

The global batch of a step is one and the same on 1 to 6 ranks; each takes an equal share of its
samples, and the loss is their mean. Losses and weights are then equal up to the order of sums.
There is no ReLU in it, since an input near 0 would make a difference of rounding a larger one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.datasets.utils import Batch

GLOBAL_BATCH = 24
"""Samples of a step over all ranks; 1, 2, 3, 4 and 6 ranks get equal shares."""

BAGS = {"user": (60, 16), "tag": (12, 16), "genre": (8, 8)}
"""Rows and dim; each has the feature of its name. Row-wise leaves no rank of 4 without rows."""
SEQUENCES = {"item": (40, 16), "shop": (12, 16)}

_LONGEST = 4
_ROWS = {name: rows for name, (rows, _) in (BAGS | SEQUENCES).items()}


class SmallModel(nn.Module):
    """Returns (loss, prediction) as pipelines expect.

    Args:
        seed: Seed of all weights.
        device: Device of the tables; ``meta`` for one that is only planned.
    """

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.ebc = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=[name],
                    pooling=PoolingType.MEAN if name == "tag" else PoolingType.SUM,
                )
                for name, (rows, dim) in BAGS.items()
            ],
        )
        self.ec = EmbeddingCollection(
            device=torch.device(device),
            tables=[
                EmbeddingConfig(
                    name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name]
                )
                for name, (rows, dim) in SEQUENCES.items()
            ],
        )
        self._bags = tuple(BAGS)
        self._dim_of_sequence = tuple((name, dim) for name, (_, dim) in SEQUENCES.items())
        dims = [dim for _, dim in (BAGS | SEQUENCES).values()]
        self.over = nn.Sequential(nn.Linear(sum(dims), 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gives the mean squared error and the predictions, shape ``(B,)``."""
        pooled = self.ebc(batch.sparse_features)
        found = self.ec(batch.sparse_features)
        columns = [pooled[name] for name in self._bags]
        columns += [
            found[name].to_padded_dense(_LONGEST).sum(1).reshape(-1, dim)
            for name, dim in self._dim_of_sequence
        ]
        out = self.over(torch.cat(columns, dim=1)).squeeze(1)
        return ((out - batch.labels) ** 2).mean(), out.detach()


def rank_batch(step: int, rank: int, world_size: int) -> Batch:
    """A rank's share of a step's samples, skewed to low ids, with empty bags and sequences."""
    generator = torch.Generator().manual_seed(7_000 + step)
    share = GLOBAL_BATCH // world_size
    mine = slice(rank * share, (rank + 1) * share)
    values, lengths = [], []
    for rows in _ROWS.values():
        lengths_B = torch.randint(0, _LONGEST + 1, (GLOBAL_BATCH,), generator=generator)
        ids_N = (torch.rand(int(lengths_B.sum()), generator=generator) ** 3 * rows).long()
        values += ids_N.split(lengths_B.tolist())[mine]
        lengths.append(lengths_B[mine])
    labels_B = torch.randn(GLOBAL_BATCH, generator=generator)
    return Batch(
        dense_features=torch.zeros(share, 1),
        sparse_features=KeyedJaggedTensor(
            keys=list(_ROWS), values=torch.cat(values), lengths=torch.cat(lengths)
        ),
        labels=labels_B[mine],
    )
