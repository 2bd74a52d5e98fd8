"""Training without any sharding: the witness where TorchRec has no kernel on the CPU.

Every rank has the whole model and its own batches; gradients are averaged over ranks, and FBGEMM's
formulas update whole tables. Batches may be of any size, also 0 on some ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import Result, Table
from tests.support.dense_updates import DenseUpdate


def train_unsharded(
    model: nn.Module, batches: Sequence[Batch], tables: Sequence[Table], **optimizer: Any
) -> tuple[Result, list[Tensor]]:
    """What is left behind, and each step's output; settings are those of :class:`DenseUpdate`."""
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
