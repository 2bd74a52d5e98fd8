"""What counts as a difference: more than rounding and a kink, for one sample or for all."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedTensor

from torchrec_picasso.proof.comparison import Tolerance, difference_of, difference_of_outputs

FLOAT32, BFLOAT16 = (Tolerance(torch.finfo(t).eps) for t in (torch.float32, torch.bfloat16))
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
