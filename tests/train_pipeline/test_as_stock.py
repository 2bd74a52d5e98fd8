"""What ``TrainPipelineSparseDist`` trains, ours trains: to the same weights, state and outputs.

Modules of TorchRec's own beside ours, and models that use them in part; tables of both kinds in one
module are lines of ``docs/features.md``, which ``test_feature_table.py`` runs.
The witness is TorchRec itself: its sharders, its exchange, its pipeline. Summation order differs,
hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.support.shared_run import run_once
from tests.train_pipeline.runs import ATOL, RTOL
from tests.train_pipeline.stock_models import (
    DIM,
    FEATURES,
    batch_of,
    build,
    ebc,
    left_behind,
    processed,
    sequences,
    train_ours,
    train_stock,
)

NUM_STEPS = 5


class _Model(nn.Module):
    """Pooled features under one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make()
        self.over = nn.Linear(DIM * (1 + len(FEATURES)), 1)

    def make(self) -> None:
        self.ebc = ebc(*FEATURES)

    def look_up(self, features: KeyedJaggedTensor) -> Sequence[Tensor]:
        pooled = self.ebc(features)
        return [pooled[name] for name in FEATURES]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.look_up(batch.sparse_features)
        out = self.over(torch.cat([batch.dense_features, *pooled], dim=1)).squeeze(1)
        return ((out - batch.labels) ** 2).mean(), out.detach()


class _Processed(_Model):
    """Weights by position beside hot/cold tables."""

    def make(self) -> None:
        self.fp, self.ebc = processed("f"), ebc("g", "h")

    def look_up(self, features: KeyedJaggedTensor) -> Sequence[Tensor]:
        processed, pooled = self.fp(features), self.ebc(features)
        return [processed["f"], pooled["g"], pooled["h"]]


class _Sequences(_Model):
    """Sequences, pooled by the model, beside hot/cold tables."""

    def make(self) -> None:
        self.ec, self.ebc = sequences("f", "g"), ebc("h")

    def look_up(self, features: KeyedJaggedTensor) -> Sequence[Tensor]:
        rows, pooled = self.ec(features), self.ebc(features)
        summed = [
            torch.segment_reduce(rows[name].values(), "sum", lengths=rows[name].lengths())
            for name in ("f", "g")
        ]
        return [*summed, pooled["h"]]


class _Frozen(_Model):
    """One collection under ``no_grad``, one whose output is cut off, one trained."""

    def make(self) -> None:
        self.still, self.off, self.ebc = ebc("f"), ebc("g"), ebc("h")

    def look_up(self, features: KeyedJaggedTensor) -> Sequence[Tensor]:
        with torch.no_grad():
            still = self.still(features)["f"]
        return [still, self.off(features)["g"].detach(), self.ebc(features)["h"]]


class _Changed(_Model):
    """Its tables' input is made inside the model."""

    def make(self) -> None:
        self.changed, self.ebc = ebc("f"), ebc("g", "h")

    def look_up(self, features: KeyedJaggedTensor) -> Sequence[Tensor]:
        changed, pooled = self.changed(features.permute([0])), self.ebc(features)
        return [changed["f"], pooled["g"], pooled["h"]]


class _Quiet(_Model):
    """Gives no loss in evaluation."""

    def forward(self, batch: Batch) -> Any:
        loss, out = super().forward(batch)
        return (loss if self.training else None), out


@dataclass(frozen=True)
class _Case:
    """A model, and how it is trained."""

    make: Callable[[], nn.Module] = _Model
    told: Sequence[str] = ()
    """Of the summary."""
    settings: Sequence[int | None] = (1, 3, None)
    build: dict[str, Any] = field(default_factory=dict)
    inside: bool = False
    """Whether the pipeline gets the model without its wrapper."""
    evaluates: bool = False


ONCE = "computed once per batch, of its exchange only that of ids is hidden: "
CASES = {
    "processed": _Case(
        _Processed,
        told=[
            f"fp: {ONCE}it is a ShardedFeatureProcessedEmbeddingBagCollection, with TorchRec's "
            "exchange",
            "ebc: interleaved",
        ],
    ),
    "sequences": _Case(
        _Sequences,
        told=[f"ec: {ONCE}it is a ShardedEmbeddingCollection, with TorchRec's exchange"],
    ),
    "frozen": _Case(_Frozen, told=["still: interleaved", "off: interleaved"]),
    "changed": _Case(
        _Changed,
        settings=(1, None),
        told=[
            "changed: not pipelined: its input is not read off the batch but made inside the model",
            "ebc: interleaved",
        ],
    ),
    "without_wrapper": _Case(inside=True, told=["ebc: interleaved"]),
    "not_data_parallel": _Case(build={"is_wrapped": False}, told=["ebc: interleaved"]),
    "quiet": _Case(_Quiet, evaluates=True),
}


def _train(case: _Case, rank: int, is_ours: bool, **settings: Any) -> tuple[Any, str]:
    model = build(case.make(), () if is_ours else None, **case.build)
    batches = [batch_of(rank, step) for step in range(NUM_STEPS)]
    outputs: list[Any] = []
    summary = ""
    for part in (batches[:4], batches[4:]) if case.evaluates else (batches,):
        if is_ours:
            found, summary = train_ours(model, part, inside=case.inside, **settings)
        else:
            found = train_stock(model, part, inside=case.inside)
        outputs += found
        model.eval()
    model.train()
    return (left_behind(model), outputs), summary


def _run(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for name, case in CASES.items():
        results[name] = _train(case, rank, is_ours=False)[0]
        for num_micro_batches in case.settings:
            try:
                results[name, num_micro_batches] = _train(
                    case, rank, is_ours=True, num_micro_batches=num_micro_batches
                )
            except Exception as error:
                error.add_note(f"{name}, {num_micro_batches} micro-batches")
                raise
    return results


@pytest.mark.parametrize(
    ("name", "num_micro_batches"), [(n, k) for n, case in CASES.items() for k in case.settings]
)
def test_trains_as_torchrec_does(name: str, num_micro_batches: int | None) -> None:
    for results in run_once(_run, 2):
        (mine, outputs), summary = results[name, num_micro_batches]
        stock, expected = results[name]
        assert len(stock) > 4
        torch.testing.assert_close(mine, stock, rtol=RTOL, atol=ATOL)
        assert len(outputs) == NUM_STEPS
        torch.testing.assert_close(outputs, expected, rtol=RTOL, atol=ATOL)
        for line in CASES[name].told:
            assert line in summary, summary
