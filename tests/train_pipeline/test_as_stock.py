"""What ``TrainPipelineSparseDist`` trains, ours trains: to the same weights, state and outputs.

Modules of TorchRec's own beside ours, and models that use them in part; tables of both kinds in one
module are lines of ``docs/features.md``, which ``test_feature_table.py`` runs.
The witness is TorchRec itself: its sharders, its exchange, its pipeline. Summation order differs,
hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.train_pipeline.programs import STEPS, Head, Program, assert_as_stock, cases_of
from tests.train_pipeline.stock_models import ebc, processed, sequences


class _Model(nn.Module):
    """Some modules with tables under a head."""

    def __init__(self, head: type[Head]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make()
        self.head = head()

    def make(self) -> None:
        raise NotImplementedError

    def look_up(self, features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        return self.head(self.look_up(batch.sparse_features), batch)


class _Processed(_Model):
    """Weights by position beside hot/cold tables."""

    def make(self) -> None:
        self.fp, self.ebc = processed("f"), ebc("g", "h")

    def look_up(self, features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
        processed, pooled = self.fp(features), self.ebc(features)
        return {"f": processed["f"], "g": pooled["g"], "h": pooled["h"]}


class _Sequences(_Model):
    """Sequences, pooled by the model, beside hot/cold tables."""

    def make(self) -> None:
        self.ec, self.ebc = sequences("f", "g"), ebc("h")

    def look_up(self, features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
        rows, pooled = self.ec(features), self.ebc(features)
        summed = {
            name: torch.segment_reduce(rows[name].values(), "sum", lengths=rows[name].lengths())
            for name in ("f", "g")
        }
        return {**summed, "h": pooled["h"]}


class _Frozen(_Model):
    """One collection under ``no_grad``, one whose output is cut off, one trained."""

    def make(self) -> None:
        self.still, self.off, self.ebc = ebc("f"), ebc("g"), ebc("h")

    def look_up(self, features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
        with torch.no_grad():
            still = self.still(features)["f"]
        return {"f": still, "g": self.off(features)["g"].detach(), "h": self.ebc(features)["h"]}


class _Changed(_Model):
    """Its tables' input is made inside the model."""

    def make(self) -> None:
        self.changed, self.ebc = ebc("f"), ebc("g", "h")

    def look_up(self, features: KeyedJaggedTensor) -> Mapping[str, Tensor]:
        changed, pooled = self.changed(features.permute([0])), self.ebc(features)
        return {"f": changed["f"], "g": pooled["g"], "h": pooled["h"]}


class _Quiet(Head):
    """Gives no loss in evaluation."""

    def loss(self, out: Tensor, batch: Batch) -> Any:
        return super().loss(out, batch) if self.training else None


ONCE = "computed once per batch, of its exchange only that of ids is hidden: "
INTERLEAVED = "ebc: interleaved"
PROGRAMS = {
    "processed": Program(
        model=_Processed,
        told=[
            f"fp: {ONCE}it is a ShardedFeatureProcessedEmbeddingBagCollection, with TorchRec's "
            "exchange",
            INTERLEAVED,
        ],
        numbers=(1, 3, None),
    ),
    "sequences": Program(
        model=_Sequences,
        told=[f"ec: {ONCE}it is a ShardedEmbeddingCollection, with TorchRec's exchange"],
        numbers=(1, 3, None),
    ),
    "frozen": Program(
        model=_Frozen, told=["still: interleaved", "off: interleaved"], numbers=(1, 3, None)
    ),
    "changed": Program(
        model=_Changed,
        told=[
            "changed: not pipelined: its input is not read off the batch but made inside the model",
            INTERLEAVED,
        ],
        numbers=(1, None),
    ),
    "without wrapper": Program(is_inside=True, told=[INTERLEAVED], numbers=(1, 3, None)),
    "not data parallel": Program(is_wrapped=False, told=[INTERLEAVED], numbers=(1, 3, None)),
    "no loss in evaluation": Program(
        head=_Quiet,
        before_step=lambda model, step: model.train(step != STEPS - 1),
        numbers=(1, 3, None),
    ),
}


@cases_of(PROGRAMS)
def test_trains_as_torchrec_does(name: str, num_micro_batches: int | None) -> None:
    assert_as_stock(__name__, name, num_micro_batches)
