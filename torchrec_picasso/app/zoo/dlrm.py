"""TorchRec's DLRM, built from a configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_picasso.app.config import ModelConfig
from torchrec_picasso.app.zoo.tables import NUM_DENSE, TableSpec


def build_dlrm(model: ModelConfig, tables: Sequence[TableSpec], seed: int) -> DLRMTrain:
    """Builds a DLRM with its loss, tables on the meta device, towers initialised from ``seed``."""
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
