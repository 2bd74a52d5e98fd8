"""Random layers give their means, whichever way they draw; what cannot is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchrec_picasso.proof.comparison import StillRandomness

ROWS = torch.arange(24.0).view(6, 4)
attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

LEFT_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": nn.Dropout(0.5),
    "by channel": lambda x: nn.functional.dropout1d(x.view(1, 6, 4), 0.5).view(6, 4),
    "function": lambda x: nn.functional.dropout(x, 0.3),
    "noise": lambda x: x + torch.randn_like(x) + torch.zeros_like(x).normal_(),
    "centred": lambda x: x + torch.rand_like(x) - torch.empty_like(x).uniform_(),
    "by hand": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)) / 0.5,
    "of a size": lambda x: x + torch.randn(6, 4) + torch.rand(6, 4) - 0.5,
}


@pytest.mark.parametrize("name", list(LEFT_ALONE))
def test_the_mean_of_a_random_layer_is_its_input(name: str) -> None:
    with StillRandomness() as still:
        found = LEFT_ALONE[name](ROWS)
    torch.testing.assert_close(found, ROWS)
    assert not still.drawn


def test_gradients_pass_as_without_dropout() -> None:
    rows = ROWS.clone().requires_grad_()
    with StillRandomness():
        nn.functional.dropout(rows, 0.5).sum().backward()
    torch.testing.assert_close(rows.grad, torch.ones_like(rows))


def test_attention_drops_nothing_and_is_the_same_for_every_cut() -> None:
    rows = torch.rand(6, 3, 4)
    with StillRandomness() as still:
        whole = attention(rows, rows, rows)[0]
        parts = [attention(part, part, part)[0] for part in rows.split([1, 5])]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not still.drawn


def test_random_states_are_not_touched_and_what_draws_all_the_same_is_named() -> None:
    state = torch.get_rng_state()
    with StillRandomness() as still:
        LEFT_ALONE["noise"](ROWS)
    assert torch.get_rng_state().equal(state)
    with StillRandomness() as still:
        torch.randperm(4)
    assert any("randperm" in name for name in still.drawn)


def test_what_decides_for_a_batch_is_named() -> None:
    for draw in (lambda: torch.rand(()) < 0.4, lambda: torch.bernoulli(torch.tensor([0.4]))):
        with StillRandomness() as still:
            draw()
        assert "of a single number" in " ".join(still.drawn)


def test_the_coarsest_type_is_noted() -> None:
    with StillRandomness() as still:
        ROWS * 2
    assert still.coarsest == torch.finfo(torch.float32).eps
    with StillRandomness() as still:
        (ROWS.bfloat16() * 2).double()
    assert still.coarsest == torch.finfo(torch.bfloat16).eps
