"""The DIN for clicks, sample by sample."""

from __future__ import annotations

import numpy as np
import torch

from tests.app.zoo.test_clicks import make_clicks
from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.din import build_din


def _on_cpu() -> ClickModel:
    train = build_din(make_clicks(), sequence_dim=4, profile_dim=8, seed=3).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in train.parameters():
        torch.nn.init.normal_(parameter)
    return train


def test_the_history_counts_and_so_does_the_profile() -> None:
    clicks, train = make_clicks(), _on_cpu()
    logits = train(clicks.batch(np.arange(4)))[1][1]
    for kind, table in (
        ("target_4.embeddings", "t_item"),
        ("profile.embedding_bags", "t_user"),
    ):
        parameter = train.get_parameter(f"embeddings.collections.{kind}.{table}.weight")
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter[7 if table == "t_user" else 9] += 1  # rows of samples 0 and 2 alone
        changed = train(clicks.batch(np.arange(4)))[1][1] != logits
        assert changed.tolist() == [True, False, True, False]
        with torch.no_grad():
            parameter.copy_(before)


def test_the_seed_draws_the_dense_weights() -> None:
    first, again, other = (build_din(make_clicks(), seed=seed) for seed in (0, 0, 1))
    weights = [of.head.model.over_arch[0].weight for of in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert all(of.is_meta for of in first.embeddings.parameters())
