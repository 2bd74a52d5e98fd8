"""A model of clicks as pipelines train it: embeddings, what is computed over them, and the loss."""

from __future__ import annotations

from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups

__all__ = ["ClickModel"]


class ClickModel(nn.Module):
    """Binary cross-entropy of logits, summed over tasks, a mean over samples.

    Args:
        embeddings: Of all groups of columns.
        head: Takes what they found and the dense features; gives the logits, ``(B,)`` or of several
            tasks ``(B, tasks)``, or these and a loss of its own that is a mean over samples.
    """

    def __init__(self, embeddings: FeatureGroups, head: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.head = _WithLoss(head)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Gives the loss, and what a pipeline hands out of a step: loss, logits and labels."""
        found = self.embeddings(batch.sparse_features)
        loss, logits = self.head(found, batch.dense_features, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class _WithLoss(nn.Module):
    """A module without tables, which TorchRec's tracing leaves alone, whatever it computes."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.model = head

    def forward(self, found: object, dense_BI: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        given = self.model(found, dense_BI)
        logits, own_loss = given if isinstance(given, tuple) else (given, None)
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        )
        loss = losses.sum() / losses.size(0)
        return loss if own_loss is None else loss + own_loss, logits
