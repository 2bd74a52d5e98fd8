"""The model: attention over two histories, beside pooled profiles, under a thin over-arch.

Smooth throughout: at a kink, a sum in another order becomes another gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.sequences.attention import AttentionUnit
from benchmarks.sequences.clicks import HISTORIES, PROFILES, Clicks

__all__ = ["PROFILE_DIM", "SEQUENCE_DIM", "SequencesModel", "build_model"]

SEQUENCE_DIM, PROFILE_DIM = 64, 16
_HIDDEN, _ATTENTION_HIDDEN, _TABLE_LR = 64, 16, 0.02
_META = torch.device("meta")


class SequencesModel(nn.Module):
    """Logits of clicks.

    Args:
        clicks: Tell the tables' sizes; the tables are on the meta device.
    """

    def __init__(self, clicks: Clicks) -> None:
        super().__init__()
        self.sequences = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=f"t_{target}",
                    embedding_dim=SEQUENCE_DIM,
                    num_embeddings=clicks.num_rows(target),
                    feature_names=[target, history],
                )
                for target, history in HISTORIES.items()
            ],
            device=_META,
        )
        self.profiles = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{name}",
                    embedding_dim=PROFILE_DIM,
                    num_embeddings=clicks.num_rows(name),
                    feature_names=[name],
                )
                for name in PROFILES
            ],
            device=_META,
        )
        self.attention = nn.ModuleDict(
            {target: AttentionUnit(SEQUENCE_DIM, _ATTENTION_HIDDEN) for target in HISTORIES}
        )
        width = 2 * SEQUENCE_DIM * len(HISTORIES) + PROFILE_DIM * len(PROFILES)
        self.over_arch = nn.Sequential(nn.Linear(width, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The loss, and what a pipeline hands out of a step: loss, logits and labels."""
        found = self.sequences(batch.sparse_features)
        pooled = self.profiles(batch.sparse_features)
        parts = []
        for target, history in HISTORIES.items():
            target_BD = found[target].values()
            parts += [target_BD, self.attention[target](target_BD, found[history])]
        parts += [pooled[name] for name in PROFILES]
        logits_B = self.over_arch(torch.cat(parts, dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, (loss.detach(), logits_B.detach(), batch.labels.detach())


def build_model(clicks: Clicks, seed: int) -> SequencesModel:
    """The model before sharding, row-wise Adagrad fused into its tables.

    Args:
        clicks: Tell the tables' sizes.
        seed: Draws the dense weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SequencesModel(clicks)
    for collection in (model.sequences, model.profiles):
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": _TABLE_LR})
    return model
