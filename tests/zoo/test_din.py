"""The DIN-like model: its attention against a loop, its logits sample by sample."""

from __future__ import annotations

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.zoo.test_clicks import make_clicks
from torchrec_picasso.zoo.din import DINTrain, build_din
from torchrec_picasso.zoo.layers.attention_unit import AttentionUnit


def test_attention_is_that_of_a_loop_over_samples() -> None:
    torch.manual_seed(0)
    unit = AttentionUnit(dim=4, hidden=3)
    lengths = torch.tensor([2, 0, 3])
    rows, target = torch.randn(5, 4), torch.randn(3, 4)
    found = unit(target, JaggedTensor(values=rows, lengths=lengths))
    for sample, clicks in enumerate(rows.split(lengths.tolist())):
        expected = torch.zeros(4)
        for click in clicks:
            both = torch.cat([click, target[sample], click * target[sample]])
            expected = expected + unit.weigh(both) * click
        torch.testing.assert_close(found[sample], expected)


def _on_cpu() -> DINTrain:
    train = build_din(make_clicks(), sequence_dim=4, profile_dim=8, seed=3).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in train.parameters():
        torch.nn.init.normal_(parameter)
    return train


def test_samples_do_not_see_each_other() -> None:
    clicks, train = make_clicks(), _on_cpu()
    loss, (same, logits, labels) = train(clicks.batch(np.arange(4)))
    assert loss.requires_grad
    assert loss.item() == same.item()
    alone = [train(clicks.batch(np.array([sample])))[1][1] for sample in range(4)]
    torch.testing.assert_close(torch.cat(alone), logits)
    torch.testing.assert_close(
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels), same
    )


def test_the_history_counts_and_so_does_the_profile() -> None:
    clicks, train = make_clicks(), _on_cpu()
    logits = train(clicks.batch(np.arange(4)))[1][1]
    for kind, table in (("sequences.embeddings", "t_item"), ("profiles.embedding_bags", "t_user")):
        parameter = train.get_parameter(f"model.{kind}.{table}.weight")
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter[7 if table == "t_user" else 9] += 1  # rows of samples 0 and 2 alone
        changed = train(clicks.batch(np.arange(4)))[1][1] != logits
        assert changed.tolist() == [True, False, True, False]
        with torch.no_grad():
            parameter.copy_(before)


def test_the_seed_draws_the_dense_weights() -> None:
    first, again, other = (build_din(make_clicks(), seed=seed) for seed in (0, 0, 1))
    weights = [of.model.over_arch[0].weight for of in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first.model.sequences.embeddings["t_item"].weight.is_meta
