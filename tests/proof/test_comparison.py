"""Differences that count: more than rounding and a kink, for one sample or for all.

Random layers give their means, whichever way they draw; what cannot is named.
"""

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedTensor

from torchrec_picasso.proof.comparison import (
    StillRandomness,
    difference_of,
    difference_of_outputs,
    difference_of_states,
    state_of,
)

FLOAT32, BFLOAT16 = (torch.finfo(t).eps for t in (torch.float32, torch.bfloat16))
ROWS = torch.rand(4000, 8, generator=torch.Generator().manual_seed(0)) + 0.5


def _scaled(share: float, factor: float) -> Tensor:
    """The first samples, a share of all, times a factor."""
    rows = ROWS.clone()
    rows[: int(share * len(rows))] *= factor
    return rows


def test_rounding_and_a_kink_are_no_difference() -> None:
    assert difference_of(ROWS, ROWS * (1 + 1e-5), FLOAT32) is None
    assert difference_of(ROWS, _scaled(0.001, 1.05), FLOAT32) is None
    assert difference_of(ROWS, ROWS.bfloat16().float(), BFLOAT16) is None
    assert difference_of(ROWS, ROWS.bfloat16().float(), FLOAT32) is not None


def test_little_for_all_or_much_for_some_is_a_difference() -> None:
    assert difference_of(ROWS, ROWS * 1.0003, FLOAT32) == "differs by 0.03 %"
    assert difference_of(ROWS, _scaled(0.03, 1.1), FLOAT32) == "differs by 0.3 %"
    assert difference_of(ROWS, -ROWS, FLOAT32) == "differs by 2e+02 %"
    assert difference_of(torch.tensor(1.0), torch.tensor(1.01), FLOAT32) == "differs by 1 %"


def test_samples_without_gradient_do_not_hide_the_others() -> None:
    sparse, other = torch.zeros_like(ROWS), torch.zeros_like(ROWS)
    sparse[:100], other[:100] = ROWS[:100], ROWS[:100] * 1.1
    assert difference_of(sparse, other, FLOAT32) == "differs by 10 %"


def test_nothing_compares_with_nothing() -> None:
    assert difference_of(ROWS[:0], ROWS[:0], FLOAT32) is None
    assert difference_of(torch.zeros(3), torch.zeros(3), FLOAT32) is None
    assert difference_of(ROWS, ROWS[1:], FLOAT32) == "has shape (3999, 8) instead of (4000, 8)"


def test_what_is_no_number_differs_and_what_is_endless_compares() -> None:
    nan, inf = torch.tensor([torch.nan, 1.0]), torch.tensor([-torch.inf, 1.0])
    assert difference_of(nan, nan, FLOAT32) == "is not a number, so it cannot be compared"
    assert difference_of(inf, inf, FLOAT32) is None
    for one, other in ((inf, inf.abs()), (inf, 1.1 * inf), (inf.exp(), inf), (inf.exp(), nan)):
        assert difference_of(one, other, FLOAT32) is not None


def test_complex_numbers_differ_by_their_phase() -> None:
    waves = torch.polar(ROWS.abs(), ROWS)
    assert difference_of(waves, waves * (1 + 1e-6), FLOAT32) is None
    for other in (waves.conj().resolve_conj(), waves * 1j, 1.01 * waves):
        assert difference_of(waves, other, FLOAT32) is not None
    assert difference_of(waves, waves * torch.nan, FLOAT32) is not None


def test_few_integers_may_differ() -> None:
    ranks = torch.arange(4000)
    assert difference_of_outputs(ranks, ranks.clamp(min=4), FLOAT32) is None
    found = difference_of_outputs({"over": ranks > 99}, {"over": ranks > 120}, FLOAT32)
    assert found == "output['over'] differs in 21 of 4000 entries"


def test_outputs_are_compared_part_by_part() -> None:
    def output(factor: float, count: int = 3) -> dict[str, object]:
        return {
            "all": (ROWS, KeyedTensor(["x"], [8], ROWS * factor)),
            "kinds": torch.tensor([count]),
            "rows": JaggedTensor(ROWS, lengths=torch.full((1000,), 4)),
            "name": "same",
        }

    assert difference_of_outputs(output(1.0), output(1.0, count=4), FLOAT32) is None
    found = difference_of_outputs(output(1.0), output(1.5), FLOAT32)
    assert found == "output['all'][1] differs by 50 %"


MATRIX = torch.arange(24.0).view(6, 4)
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


def test_state_is_compared_through_weak_references() -> None:
    layer = nn.GRU(4, 8)  # it refers to its weights so
    model, other = copy.deepcopy(layer), copy.deepcopy(layer)
    assert difference_of_states(state_of(model), state_of(other), FLOAT32) is None
    model.seen, other.seen = weakref.ref(ROWS), weakref.ref(MATRIX)
    assert difference_of_states(state_of(model), state_of(other), FLOAT32) is not None


@pytest.mark.parametrize("name", list(LEFT_ALONE))
def test_the_mean_of_a_random_layer_is_its_input(name: str) -> None:
    with StillRandomness() as still:
        found = LEFT_ALONE[name](MATRIX)
    torch.testing.assert_close(found, MATRIX)
    assert not still.drawn


def test_gradients_pass_as_without_dropout() -> None:
    rows = MATRIX.clone().requires_grad_()
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
        LEFT_ALONE["noise"](MATRIX)
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
        MATRIX * 2
    assert still.coarsest == torch.finfo(torch.float32).eps
    with StillRandomness() as still:
        (MATRIX.bfloat16() * 2).double()
    assert still.coarsest == torch.finfo(torch.bfloat16).eps
