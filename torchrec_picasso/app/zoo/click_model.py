"""A click model as pipelines train it: embeddings, the dense part over them, and the loss."""

from __future__ import annotations

from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.zoo.feature_groups import FeatureGroups


class ClickModel(nn.Module):
    """Binary cross-entropy of logits: a sum over tasks and candidates, a mean over samples.

    Args:
        embeddings: Embeddings of all groups of columns.
        head: Maps embeddings and dense features to logits, ``(B,)``, for several tasks
            ``(B, tasks)``, of C candidates ``(B, C, tasks)``, or to logits and a further loss that
            is a mean over samples.
    """

    def __init__(self, embeddings: FeatureGroups, head: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.head = _WithLoss(head)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Returns the loss, and the step's output: detached loss, logits and labels."""
        found = self.embeddings(batch.sparse_features)
        loss, logits = self.head(found, batch.dense_features, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class _WithLoss(nn.Module):
    """Head and loss in one module: it has no tables, so TorchRec's tracing does not enter it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.model = head

    def forward(self, found: object, dense_BI: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(found, dense_BI)
        logits, extra_loss = output if isinstance(output, tuple) else (output, None)
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        )
        loss = losses.sum() / losses.size(0)
        return loss if extra_loss is None else loss + extra_loss, logits
