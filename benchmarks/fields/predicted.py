"""Prices by the planner's cost model: of a plan it made, or of one made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from torchrec.distributed.types import ParameterSharding

from benchmarks.fields.variants import AGAIN
from benchmarks.pipelines.rankings import Standing
from torchrec_picasso.app.runs.placements import Placement
from torchrec_picasso.cost.step_price import StepPricer
from torchrec_picasso.cost.stock import STOCK_TYPES
from torchrec_picasso.placement import Form, HotColdParams
from torchrec_picasso.planner.choice import price_plan
from torchrec_picasso.planner.decision import Decision


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Prediction of one step.

    Args:
        step_ms: Step time of the schedule that runs.
        wire_ms: Time on the wire, a lower bound of any schedule.
        compute_ms: Time of local work, a lower bound, too.
        sent_bytes: Bytes per rank, without the dense part.
    """

    step_ms: float
    wire_ms: float
    compute_ms: float
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Differences of predictions from measurements, as shares of the measured value.

    Args:
        step: Error of each variant's step, above 0 where it took less than predicted.
        sent_bytes: Error of each variant's bytes.
        median_step: Median size of the steps' errors.
        worst_step: Largest error of a step.
        worst_bytes: Largest error of a variant's bytes.
        ours_over_best: Step of the planner's choice to that of the fastest other variant, but for
            the same stock plan once more.
    """

    step: dict[str, float]
    sent_bytes: dict[str, float]
    median_step: float
    worst_step: float
    worst_bytes: float
    ours_over_best: float | None


def predict(
    decision: Decision, placement: Placement, num_micro_batches: int | None
) -> Predicted | None:
    """Prices a placement.

    Returns:
        ``None`` where a table is sharded in a way that has no price.
    """
    shardings: dict[str, ParameterSharding] = {
        name: sharding
        for module_plan in placement.plan.plan.values()
        for name, sharding in module_plan.items()  # type: ignore[attr-defined]
    }
    forms: dict[int, Form] = {}
    num_hot: dict[int, int] = {}
    stock_types: dict[int, str | None] = {}
    for position, work in enumerate(decision.works):
        sharding = shardings[work.load.name]
        params, is_priced = sharding.cache_params, sharding.sharding_type in STOCK_TYPES
        if isinstance(params, HotColdParams):
            forms[position], num_hot[position] = params.form, params.num_hot_rows
        elif not is_priced:
            return None
        stock_types[position] = sharding.sharding_type if is_priced else None
    counts = [num_micro_batches or 1]
    pricer = StepPricer(decision.curves, decision.world_size, decision.dense, counts)
    plan = price_plan(decision.works, forms, num_hot, stock_types, pricer)
    price, step_ms = plan.step, plan.step.step_ms
    if forms and num_micro_batches is None:
        # TorchRec's pipeline hides the exchange of ids alone, as of stock tables
        ids = [plan.sent_bytes[name] for name in ("header", "ids")]
        ids_ms = sum(pricer.curves.ms("row_exchange", sent, pricer.world_size) for sent in ids)
        step_ms = price.wire_ms + price.compute_ms - min(ids_ms, price.compute_ms)
    return Predicted(
        step_ms=step_ms,
        wire_ms=price.wire_ms,
        compute_ms=price.compute_ms,
        sent_bytes=sum(plan.sent_bytes.values()),
    )


def mean_of(prices: Sequence[Predicted]) -> Predicted:
    """Mean of predictions by curves from several moments."""
    names = [field.name for field in dataclasses.fields(Predicted)]
    return Predicted(**{name: fmean(getattr(price, name) for price in prices) for name in names})


def errors_of(
    predicted: dict[str, Predicted], found: dict[str, Standing], dense_bytes: float
) -> Errors | None:
    """Compares predictions with measurements; ``None`` without predictions. ``dense_bytes``, sent
    per rank and step to sum dense gradients, are in the measured bytes, not in the predicted."""
    if not predicted:
        return None
    step = {
        name: prediction.step_ms / found[name].step_ms[1] - 1
        for name, prediction in predicted.items()
    }
    sent = {
        name: (prediction.sent_bytes + dense_bytes) / found[name].metered_bytes_per_step - 1
        for name, prediction in predicted.items()
    }
    others = [one.step_ms[1] for name, one in found.items() if name not in ("ours", AGAIN)]
    ours = found["ours"].step_ms[1] / min(others) if "ours" in found and others else None
    return Errors(
        step=step,
        sent_bytes=sent,
        median_step=median(map(abs, step.values())),
        worst_step=max(map(abs, step.values())),
        worst_bytes=max(map(abs, sent.values())),
        ours_over_best=ours,
    )
