"""Programs that change their model in odd places, or that see tensors from around a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.train_pipeline.programs import STEPS, Head, Program, assert_as_stock, cases_of
from tests.train_pipeline.stock_models import dense_optimizer
from tests.train_pipeline.test_hostile_models import Switched


def _switching_optimizer(model: Any) -> torch.optim.Optimizer:
    """Switches the comparison of samples on where gradients are cleared, in the last step."""
    optimizer = dense_optimizer(model)
    clear, calls = optimizer.zero_grad, [0]

    def zero_grad(set_to_none: bool = True) -> None:
        calls[0] += 1
        model.module.head.compares = calls[0] == STEPS
        clear(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return optimizer


class _Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Cached(Head):
    """A weight that is computed once for all uses of a step."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.hidden, "weight", _Scale())


@contextmanager
def _compressing() -> Iterator[None]:
    """Keeps activations in 16 steps of the largest one of each tensor."""

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        step = tensor.detach().abs().max() / 16
        return torch.round(tensor.detach() / step) * step

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


PROGRAMS = {
    "switch where gradients are cleared": Program(
        head=Switched, optimizer=_switching_optimizer, refusal="differs by"
    ),
    "weights cached in a step": Program(head=Cached, within=parametrize.cached, numbers=(None, 1)),
    "weights not cached": Program(head=Cached),
    "compressed activations": Program(within=_compressing, numbers=(None, 1)),
}


@cases_of(PROGRAMS)
def test_trains_as_stock(name: str, num_micro_batches: int | None) -> None:
    assert_as_stock(__name__, name, num_micro_batches)
