"""An output that is computed once is given out in parts, and its backward runs once."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import LazyNoWait

from torchrec_picasso.errors import CompatError
from torchrec_picasso.train_pipeline.full_batch_output import FullBatchOutput

SIZES = [1, 0, 3]


class _CountsBackwards(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _CountsBackwards.calls += 1
        return grad * 2


def _values(rows: int) -> tuple[Tensor, Tensor]:
    source = torch.arange(rows * 2.0).view(rows, 2).requires_grad_()
    return source, _CountsBackwards.apply(source)


def _pooled(values: Tensor) -> Any:
    return LazyNoWait(KeyedTensor(["x"], [2], values))


def _sequences(values: Tensor) -> Any:
    return {"f": JaggedTensor(values, lengths=torch.tensor([1, 2, 0, 1]))}


@pytest.mark.parametrize("wrap", [_pooled, _sequences, lambda values: (values, None)])
def test_parts_run_backward_into_one(wrap: Any) -> None:
    source, values = _values(4)
    whole = FullBatchOutput(wrap(values), "m")
    _CountsBackwards.calls = 0
    found = []
    for index in range(len(SIZES)):
        part = whole.part(SIZES, index)
        part = part["f"] if isinstance(part, dict) else part
        part = part[0] if isinstance(part, tuple) else part
        rows = part if isinstance(part, Tensor) else part.values()
        found.append(rows)
        (rows * (index + 1)).sum().backward()
    assert _CountsBackwards.calls == 0
    whole.backward()
    assert _CountsBackwards.calls == 1
    torch.testing.assert_close(torch.cat(found), values)
    in_first = len(found[0])
    expected = torch.tensor([2.0] * in_first + [6.0] * (4 - in_first))[:, None].expand(4, 2)
    torch.testing.assert_close(source.grad, expected)


def test_a_part_is_written_into_without_a_trace_in_the_others() -> None:
    source, values = _values(4)
    whole = FullBatchOutput(_pooled(values), "m")
    for index in range(len(SIZES)):
        rows = whole.part(SIZES, index).values()
        rows *= 3
        rows.sum().backward()
    torch.testing.assert_close(whole.value.values(), values)
    whole.backward()
    torch.testing.assert_close(source.grad, torch.full((4, 2), 6.0))


def test_a_scalar_goes_to_all_parts_and_sums_their_gradients() -> None:
    source = torch.ones(4, 2, requires_grad=True)
    whole = FullBatchOutput((source * 2, source.sum()), "m")
    for index in range(len(SIZES)):
        rows, scalar = whole.part(SIZES, index)
        (rows.sum() + scalar).backward()
    whole.backward()
    torch.testing.assert_close(source.grad, torch.full((4, 2), 2.0 + len(SIZES)))


class _Odd:
    pass


@pytest.mark.parametrize(
    "output", [_Odd(), torch.zeros(3, 2), KeyedJaggedTensor([], torch.zeros(0), torch.zeros(0))]
)
def test_what_cannot_be_cut_is_handed_out_whole_or_refused_by_name(output: Any) -> None:
    assert type(FullBatchOutput(output, "m").part([4], 0)) is type(output)
    if not isinstance(output, KeyedJaggedTensor):
        named = f"module m returns a {type(output).__name__}, which cannot be cut"
        with pytest.raises(CompatError, match=re.escape(named) + ".*use num_micro_batches=1") as e:
            FullBatchOutput(output, "m").part(SIZES, 0)
        assert "split_batch=" not in str(e.value)  # that is for batches
