"""The model of this benchmark: sizes, and row-wise Adagrad fused into its tables."""

from __future__ import annotations

from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.app.zoo.din import build_din

__all__ = ["PROFILE_DIM", "SEQUENCE_DIM", "build_model"]

SEQUENCE_DIM, PROFILE_DIM = 64, 16
_TABLE_LR = 0.02


def build_model(clicks: Clicks, seed: int) -> ClickModel:
    """The model before sharding.

    Args:
        clicks: Tell the tables' sizes.
        seed: Draws the dense weights.
    """
    train = build_din(clicks, SEQUENCE_DIM, PROFILE_DIM, seed)
    apply_optimizer_in_backward(RowWiseAdagrad, train.embeddings.parameters(), {"lr": _TABLE_LR})
    return train
