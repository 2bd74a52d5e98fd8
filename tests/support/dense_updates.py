"""FBGEMM's optimizers that have no CPU kernel, written out over whole tables: the witness of ours.

Every row of a table is computed in float64, and those that were not looked up are put back. Nothing
is gathered, nothing is done in place, and all constants are float32 as a kernel's arguments are.
With them an unsharded model is trained on every rank, gradients averaged over ranks.

Source: FBGEMM ``codegen/genscript/optimizers.py``, the ``split_weight_update`` of each optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import Result, Table

OPTIMIZERS = ("adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb")


@dataclass(kw_only=True)
class DenseUpdate:
    """One table's optimizer and what it keeps."""

    name: str
    lr: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    num_steps: int = 0
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None

    def step(self, weight: Tensor, grad: Tensor, is_touched: Tensor) -> None:
        """Updates the rows that ``is_touched`` (bool by row) names, by the gradient of all."""
        if self.exp_avg is None or self.exp_avg_sq is None:
            is_partial = self.name.startswith("partial")
            self.exp_avg = torch.zeros_like(weight)
            self.exp_avg_sq = torch.zeros(len(weight)) if is_partial else torch.zeros_like(weight)
        self.num_steps += 1
        old_weight, g = weight.double(), grad.double()
        b1, b2 = np.float32(self.beta1), np.float32(self.beta2)
        m = float(b1) * self.exp_avg.double() + (1 - float(b1)) * g
        squares = g**2
        if self.exp_avg_sq.dim() == 1:
            squares = squares.mean(1)
        v = float(b2) * self.exp_avg_sq.double() + (1 - float(b2)) * squares
        v_of_element = v.unsqueeze(1) if v.dim() == 1 else v
        m_hat = m / (1 - float(np.power(b1, np.float32(self.num_steps))))
        v_hat = v_of_element / (1 - float(np.power(b2, np.float32(self.num_steps))))
        update = m_hat / (v_hat.sqrt() + self.eps) + self.weight_decay * old_weight
        if "lamb" in self.name:
            update = update * (old_weight.norm(dim=1) / update.norm(dim=1)).unsqueeze(1)
        self._put(weight, old_weight - self.lr * update, is_touched)
        self._put(self.exp_avg, m, is_touched)
        self._put(self.exp_avg_sq, v, is_touched)

    @staticmethod
    def _put(into: Tensor, new: Tensor, is_touched: Tensor) -> None:
        into.copy_(torch.where(is_touched if into.dim() == 1 else is_touched[:, None], new, into))


def train_unsharded(
    model: nn.Module, batches: Sequence[Batch], tables: Sequence[Table], **optimizer: Any
) -> tuple[Result, list[Tensor]]:
    """Returns what is left, and each step's output; settings are those of :class:`DenseUpdate`."""
    weights = {n: p for n, p in model.named_parameters() if ".embedding" in n}
    features_of = {table.name: table.features for table in tables}
    updates = {n: DenseUpdate(**optimizer) for n in weights}
    dense = torch.optim.SGD([p for n, p in model.named_parameters() if n not in weights], lr=0.05)
    outputs: list[Tensor] = []
    for batch in batches:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        outputs.append(torch.zeros(0))
        if len(batch.labels):  # TorchRec's own collections take no batch without samples
            loss, outputs[-1] = model(batch)
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for n, weight in weights.items():
            looked_up = [batch.sparse_features[f].values() for f in features_of[n.split(".")[-2]]]
            num_uses = torch.bincount(torch.cat(looked_up), minlength=len(weight))
            dist.all_reduce(num_uses)
            updates[n].step(weight.detach(), weight.grad, num_uses > 0)
        dense.step()
    states = {}
    for n, update in updates.items():
        table = n.split(".")[-2]
        states[f"{n}/{table}.momentum1"] = _whole(update.exp_avg)
        states[f"{n}/{table}.exp_avg_sq"] = _whole(update.exp_avg_sq)
    kept = {n: _whole(weight) for n, weight in weights.items()}
    others = {n: p.detach() for n, p in model.named_parameters() if n not in weights}
    return Result([], kept, states, others, replicas=[]), outputs


def _whole(value: Tensor | None) -> list[tuple[tuple[int, ...], Tensor]]:
    return [((0,) * value.dim(), value.detach())]
