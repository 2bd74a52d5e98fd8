"""TorchRec's model delta tracker says of hot/cold tables what it says of stock row-wise ones.

The tracker is read between steps, so that a batch filed under a wrong number would be missed.
Where stock is right only for TBEs of one table, each table has a learning rate of its own.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, TrackingMode
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.train_pipeline.feature_cells import (
    CPU,
    TABLES,
    Feature,
    batch_of,
    build,
    dense_optimizer,
)
from tests.train_pipeline.features import SHARED
from tests.train_pipeline.runs import pipeline_of
from tests.train_pipeline.surface import read_tracker
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import CompatError

NUM_STEPS = 5
READ_AFTER = (0, 1, 3, 4)


APART: Mapping[str, Any] = {
    # of more, a sum of losses lets states grow to 1e8
    "num_samples": lambda rank, step: 12,
    "is_placed_alike": True,
    "kwargs_of_table": {t.name: {"lr": 0.1 + i} for i, t in enumerate(TABLES)},
}
ROWS = {"*": 2}
MIXED = {"t_a": 2, "t_b": None, "t_c": "bags"}
BESIDE_STOCK = {"*": 2, "t_b": None}
IDS, ADAGRAD = TrackingMode.ID_ONLY, TrackingMode.ROWWISE_ADAGRAD
CASES: dict[str, tuple[str, Mapping[str, Any], TrackingMode, dict[str, Any]]] = {
    "bags": ("bags", ROWS, IDS, {}),
    "bags, states": ("bags", ROWS, ADAGRAD, {}),
    "bags, compacted": ("bags", MIXED, IDS, {"auto_compact": True}),
    "bags, mixed, states": ("bags", MIXED, TrackingMode.MOMENTUM_DIFF, {}),
    "sequences": ("sequences", ROWS, IDS, {}),
    "sequences, mixed": ("sequences", BESIDE_STOCK, IDS, {"auto_compact": True}),
    "sequences, rows": ("sequences", ROWS, TrackingMode.EMBEDDING, {}),
    "sequences, states": ("sequences", ROWS, ADAGRAD, {}),
}
"""Kind of collection, hot rows, what is tracked, and options of the tracker."""
DRIVERS = ("stock", "SparseDist", "K=1", "K=3", "late")
"""``late``: the tracker comes when the pipeline has the model already; then nothing is read of the
first step."""

Read = dict[str, tuple[Tensor, Tensor | None]]


def _run(rank: int, case: str, driver: str) -> list[Read]:
    kind, hot_rows, mode, options = CASES[case]
    feature = Feature(case, hot_rows=hot_rows, **APART)
    model = build(feature, kind, driver != "stock")
    dense = dense_optimizer(model)
    config = DeltaTrackerConfig(tracking_mode=mode, **options)
    pipeline: Any = TrainPipelineSparseDist(model, dense, CPU)
    if driver not in ("stock", "SparseDist"):
        number = 1 if driver == "K=1" else 3
        pipeline = pipeline_of(model, optimizer=dense, num_micro_batches=number)
    batches = iter([batch_of(feature, rank, step, True) for step in range(NUM_STEPS)])
    tracker: Any = None if driver == "late" else model.init_torchrec_delta_tracker(config)
    reads = []
    for step in range(NUM_STEPS):
        pipeline.progress(batches)
        if step in READ_AFTER and tracker is not None:
            reads.append(read_tracker(tracker))
        tracker = tracker or model.init_torchrec_delta_tracker(config)
    return reads


def _runs(rank: int, world_size: int) -> dict[tuple[str, str], list[Read]]:
    return {(case, driver): _run(rank, case, driver) for case in CASES for driver in DRIVERS}


@pytest.mark.parametrize("case", CASES)
def test_rows_and_states_are_those_of_stock(case: str) -> None:
    for on_rank in run_once(_runs, 2):
        expected = on_rank[case, "stock"]
        num_rows = [len(ids) for read in expected for ids, _ in read.values()]
        assert max(num_rows) > min(num_rows) > 0  # not all rows each time
        for driver in DRIVERS[1:]:
            tracked = expected[1:] if driver == "late" else expected
            torch.testing.assert_close(on_rank[case, driver], tracked, rtol=1e-4, atol=2e-5)


def _momentum(rank: int, world_size: int) -> tuple[list[Any], Any, str]:
    """Of a table under Adagrad: what was tracked, the state before each step; what stock says."""
    feature = Feature("adagrad", optimizer=torch.optim.Adagrad, **APART)
    config = DeltaTrackerConfig(tracking_mode=TrackingMode.MOMENTUM_LAST)
    batches = [batch_of(feature, rank, step, True) for step in range(3)]
    model, stock = build(feature, "bags", True), build(feature, "bags", False)
    tracker: Any = model.init_torchrec_delta_tracker(config)
    stock.init_torchrec_delta_tracker(config)
    try:
        stock(batches[0])
        error = "none"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    tracked, before = [], []
    for batch in batches:
        before.append({})
        for path, states in model.fused_optimizer.state_dict()["state"].items():
            (shard,) = next(iter(states.values())).local_shards()
            before[-1][path.split(".")[-2]] = shard.tensor.clone()
        loss, _ = model(batch)
        loss.backward()
        tracked.append({name.split(".")[-1]: rows for name, rows in read_tracker(tracker).items()})
    return tracked, before, error


def test_the_state_before_a_step_where_stock_reads_none() -> None:
    for tracked, before, error in run_ranks(_momentum, 2, timeout_s=60):
        for in_step, states in zip(tracked, before):
            for name, (ids, norms) in in_step.items():
                torch.testing.assert_close(norms, states[name][ids].norm(dim=1))
        assert any(norms.any() for _, norms in tracked[-1].values())
        assert "Error" in error, "TorchRec reads it on the CPU now: compare with it"


def _refused(rank: int, world_size: int) -> list[str]:
    messages = []
    for feature, kind, mode in (
        (Feature("shared", tables=SHARED), "bags", IDS),
        (Feature("row-wise"), "sequences", TrackingMode.MOMENTUM_LAST),
        (Feature("bags", hot_rows={"*": "bags"}), "bags", TrackingMode.MOMENTUM_LAST),
        (Feature("own"), "bags", None),
    ):
        model = build(feature, kind, True)
        ask = partial(model.module.tables.register_post_lookup_tracker_fn, print)
        if mode is not None:
            config = DeltaTrackerConfig(tracking_mode=mode)
            ask = partial(model.init_torchrec_delta_tracker, config)
        messages.append(refusal(CompatError, ask))
    return messages


def test_what_it_cannot_say_is_refused_where_it_is_asked_for() -> None:
    reasons = run_ranks(_refused, 2, timeout_s=60)
    for words, by_rank in zip(
        ("another table has its feature 'f'", "MOMENTUM_LAST", "MOMENTUM_LAST", "of one's own"),
        zip(*reasons),
        strict=True,
    ):
        assert all(words in reason for reason in by_rank), by_rank
