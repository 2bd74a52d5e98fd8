"""A DIN-like model: attention over histories, beside pooled profiles, under a thin over-arch.

Smooth throughout, where the paper has kinks (PReLU, Dice): at a kink, a sum in another order
becomes another gradient, and two trainings that are equal could not be told from two that are not.

Source: Zhou et al., Deep Interest Network (arXiv 1706.06978).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.zoo.clicks import Clicks, history_of
from torchrec_picasso.zoo.layers.attention_unit import AttentionUnit

__all__ = ["DIN", "DINTrain", "build_din"]


class DIN(nn.Module):
    """Logits of clicks.

    Args:
        sequences: Tables of targets and of their histories.
        profiles: Tables of everything else.
        histories: The feature with the history of each target, by the target's; both look up one
            table of ``sequences``.
        attention_hidden: Units of the layer that weighs a click.
        over_hidden: Units of the layer over all.
    """

    def __init__(
        self,
        sequences: EmbeddingCollection,
        profiles: EmbeddingBagCollection,
        histories: Mapping[str, str],
        attention_hidden: int = 16,
        over_hidden: int = 64,
    ) -> None:
        super().__init__()
        self.sequences = sequences
        self.profiles = profiles
        self.histories = dict(histories)
        dims = {
            feature: config.embedding_dim
            for config in sequences.embedding_configs()
            for feature in config.feature_names
        }
        self.attention = nn.ModuleDict(
            {target: AttentionUnit(dims[target], attention_hidden) for target in histories}
        )
        pooled = profiles.embedding_bag_configs()
        self.pooled_features = [name for config in pooled for name in config.feature_names]
        width = sum(2 * dims[target] for target in histories) + sum(
            config.embedding_dim * len(config.feature_names) for config in pooled
        )
        self.over_arch = nn.Sequential(
            nn.Linear(width, over_hidden), nn.Tanh(), nn.Linear(over_hidden, 1)
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Gives the logits, shape ``(B,)``."""
        found = self.sequences(features)
        pooled = self.profiles(features)
        parts = []
        for target, history in self.histories.items():
            target_BD = found[target].values()  # one id per sample
            parts += [target_BD, self.attention[target](target_BD, found[history])]
        parts += [pooled[name] for name in self.pooled_features]  # sharding changes their order
        logits_B1: Tensor = self.over_arch(torch.cat(parts, dim=1))
        return logits_B1.squeeze(1)


class DINTrain(nn.Module):
    """A DIN with its loss, as pipelines train it.

    Args:
        model: Gives the logits.
    """

    def __init__(self, model: DIN) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The loss, and what a pipeline hands out of a step: loss, logits and labels."""
        logits_B = self.model(batch.sparse_features)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, (loss.detach(), logits_B.detach(), batch.labels.detach())


def build_din(
    clicks: Clicks, sequence_dim: int = 16, profile_dim: int = 8, seed: int = 0
) -> DINTrain:
    """A DIN for some clicks, tables on the meta device.

    Args:
        clicks: Tell the tables and their sizes; a column's table is ``t_<column>``.
        sequence_dim: Columns of the tables of targets and histories.
        profile_dim: Columns of the other tables.
        seed: Draws the dense weights.
    """
    meta = torch.device("meta")
    sequences = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=f"t_{target}",
                embedding_dim=sequence_dim,
                num_embeddings=clicks.num_rows(target),
                feature_names=[target, history_of(target)],
            )
            for target in clicks.targets
        ],
        device=meta,
    )
    profiles = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=profile_dim,
                num_embeddings=clicks.num_rows(name),
                feature_names=[name],
            )
            for name in clicks.profiles
        ],
        device=meta,
    )
    histories = {target: history_of(target) for target in clicks.targets}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DINTrain(DIN(sequences, profiles, histories))
