"""A small model over two tables, in which each test changes one thing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests.proof.tables import given_tables
from torchrec_picasso.proof.guard import Guard
from torchrec_picasso.proof.proof import Losses, Proof, prove

FEATURES = ("f", "g")
DIM, NUM_DENSE, HIDDEN = 8, 4, 8


class Head(nn.Module):
    """Layers over pooled rows, the mean of squared errors, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM * len(FEATURES) + NUM_DENSE, HIDDEN)
        self.over = nn.Linear(HIDDEN, 1)

    def features(self, pooled: KeyedTensor, batch: Batch) -> Tensor:
        return torch.cat([batch.dense_features, *(pooled[name] for name in FEATURES)], dim=1)

    def logits(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(self.hidden(x))).squeeze(1)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return ((logits - batch.labels) ** 2).mean()

    def output(self, logits: Tensor, batch: Batch) -> Any:
        return logits.detach()

    def forward(self, pooled: KeyedTensor, batch: Batch) -> tuple[Tensor, Any]:
        logits = self.logits(self.features(pooled, batch))
        return self.loss(logits, batch), self.output(logits, batch)


class Model(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=40, feature_names=[name]
            )
            for name in FEATURES
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.head = head

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        return self.head(self.tables(batch.sparse_features), batch)


def with_loss(loss: Callable[[Head, Tensor, Batch], Tensor]) -> type[Head]:
    return type("WithLoss", (Head,), {"loss": loss})


def make_batch(num_samples: int = 12) -> Batch:
    """Some samples, with 0 to 3 lookups of each feature."""
    lengths = torch.randint(0, 4, (len(FEATURES) * num_samples,))
    return Batch(
        dense_features=torch.rand(num_samples, NUM_DENSE),
        sparse_features=KeyedJaggedTensor(
            keys=list(FEATURES), values=torch.randint(0, 40, (int(lengths.sum()),)), lengths=lengths
        ),
        labels=torch.rand(num_samples),
    )


def proved(head: nn.Module) -> tuple[Model, Guard, Batch]:
    """A model that is proved on a batch, and what guards its proof."""
    model, batch = Model(head), make_batch()
    proof = prove(model, batch, given_tables(model, batch.sparse_features))
    assert proof.reason is None
    assert proof.guard is not None
    assert proof.guard.changed(batch) is None
    return model, proof.guard, batch


def prove_head(head: nn.Module, losses: Losses = Losses.MEANS) -> Proof:
    """What comes of a head on some batch; no random number is drawn."""
    model, batch = Model(head), make_batch()
    given = given_tables(model, batch.sparse_features)
    state, numbers, drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    proof = prove(model, batch, given, losses=losses)
    assert torch.equal(state, torch.get_rng_state())
    assert numbers == random.getstate()
    assert np.array_equal(drawn, np.random.get_state()[1])
    return proof
