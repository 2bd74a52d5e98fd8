"""The model: one EmbeddingBagCollection of all fields under a thin over-arch, and its loss.

The over-arch is smooth: at a kink, a sum in another order becomes another gradient, and row-wise
Adagrad makes a whole step of it, so that losses of two right plans part by percents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.fields.workload import ModelTable
from torchrec_picasso.app.zoo.data.field_specs import FieldSpec
from torchrec_picasso.app.zoo.data.fields import NUM_DENSE

_HIDDEN = 64
_TABLE_LR = 0.02


class FieldsModel(nn.Module):
    """Logits of clicks.

    Args:
        fields: Fields of a sample; their tables are on the meta device.
    """

    def __init__(self, fields: Sequence[FieldSpec]) -> None:
        super().__init__()
        self.collection = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=field.table,
                    embedding_dim=field.dim,
                    num_embeddings=field.num_embeddings,
                    feature_names=[field.feature],
                    pooling=PoolingType.MEAN if field.mean else PoolingType.SUM,
                )
                for field in fields
            ],
            device=torch.device("meta"),
        )
        self._names = [field.feature for field in fields]
        width = NUM_DENSE + sum(field.dim for field in fields)
        self.over_arch = nn.Sequential(nn.Linear(width, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The loss, and what a pipeline hands out of a step: loss, logits and labels."""
        pooled = self.collection(batch.sparse_features).to_dict()
        # by name: a plan decides in which order columns come; and in one copy, as TorchRec's DLRM
        columns = [batch.dense_features, *(pooled[name] for name in self._names)]
        logits_B = self.over_arch(torch.cat(columns, dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, (loss.detach(), logits_B.detach(), batch.labels.detach())


def model_tables(fields: Sequence[FieldSpec]) -> list[ModelTable]:
    """The model's tables, in its order."""
    return [
        ModelTable(
            name=field.table,
            module="collection",
            num_embeddings=field.num_embeddings,
            dim=field.dim,
            ids_per_sample=field.pooling_factor,
            mean=field.mean,
        )
        for field in fields
    ]


def build_model(fields: Sequence[FieldSpec], seed: int) -> FieldsModel:
    """The model before sharding, row-wise Adagrad fused into its tables."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FieldsModel(fields)
    apply_optimizer_in_backward(RowWiseAdagrad, model.collection.parameters(), {"lr": _TABLE_LR})
    return model
