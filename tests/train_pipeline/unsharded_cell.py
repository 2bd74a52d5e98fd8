"""A feature trained without any sharding: the witness where TorchRec has no kernel on the CPU.

Every rank has the whole model and its own batch; gradients are averaged over ranks, and FBGEMM's
formulas update whole tables.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tests.sharding.jobs import Result
from tests.support.dense_updates import DenseUpdate
from tests.train_pipeline.feature_cells import (
    NUM_EVALUATED,
    NUM_TRAINED,
    Feature,
    Model,
    Outcome,
    batch_of,
)


def run_unsharded(name: str, feature: Feature, kind: str, rank: int) -> Outcome:
    """Trains, then evaluates.

    Args:
        name: Of the optimizer, as in :mod:`tests.support.dense_updates`.
        feature: Which; its model has the collection ``tables``.
        kind: Of the collection.
        rank: This one.
    """
    model = Model(feature, kind)
    weights = {n: p for n, p in model.named_parameters() if ".t_" in n}
    updates = {n: DenseUpdate(name=name, **feature.optimizer_kwargs) for n in weights}
    tables = {table.name: table for table in feature.tables}
    dense = torch.optim.SGD([p for n, p in model.named_parameters() if n not in weights], lr=0.05)
    outputs: list[Tensor] = []
    for step in range(NUM_TRAINED):
        batch = batch_of(feature, rank, step, is_ours=False)
        loss, output = model(batch)
        outputs.append(output)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for n, weight in weights.items():
            features = tables[n.split(".")[-2]].features
            found = torch.cat([batch.sparse_features[f].values() for f in features])
            num_uses = torch.bincount(found, minlength=len(weight))
            dist.all_reduce(num_uses)
            assert weight.grad is not None
            updates[n].step(weight.detach(), weight.grad, num_uses > 0)
        dense.step()
    model.eval()
    with torch.no_grad():
        batches = [
            batch_of(feature, rank, NUM_TRAINED + i, is_ours=False) for i in range(NUM_EVALUATED)
        ]
        evaluated = [model(batch)[1] for batch in batches]
    return Outcome(_result(model, weights, updates), outputs, evaluated)


def _result(
    model: Model, weights: dict[str, torch.nn.Parameter], updates: dict[str, DenseUpdate]
) -> Result:
    def whole(value: Tensor | None) -> list[tuple[tuple[int, ...], Tensor]]:
        assert value is not None
        return [((0,) * value.dim(), value.detach())]

    states = {}
    for name, update in updates.items():
        table = name.split(".")[-2]
        states[f"{name}/{table}.momentum1"] = whole(update.exp_avg)
        states[f"{name}/{table}.exp_avg_sq"] = whole(update.exp_avg_sq)
    return Result(
        losses=[],
        weights={name: whole(weight) for name, weight in weights.items()},
        states=states,
        dense={n: p.detach() for n, p in model.named_parameters() if n not in weights},
        replicas=[],
    )
