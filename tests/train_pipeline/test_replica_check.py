"""Replicas that differ from their homes are found, and named on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharding.jobs import PLAIN, Job, build, storages_of
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import batches_of, pipeline_of
from torchrec_picasso import ConfigError, InterleavedTrainPipeline, PicassoError
from torchrec_picasso.storage.row_tables import HomesAndReplicas

JOB = Job(placement={"*": 6, "c": 0}, tables=PLAIN, num_steps=7)
"""Rank 0 is home to the first half of each table."""
CASES = {"sound": None, "weight": (1, "weights", 8), "state": (0, "sum", 3), "nan": None}
"""Rank, tensor and slot in the pack of a and b of what is changed behind torch's back."""


def _run(rank: int, world_size: int) -> dict[str, str]:
    return {name: _said(name, rank, world_size) for name in CASES}


def _said(name: str, rank: int, world_size: int) -> str:
    model = build(JOB, rank, world_size)
    pipeline = pipeline_of(model, num_micro_batches=2, refresh=None, verify_every=3)
    batches, changed = iter(batches_of(JOB, rank, range(JOB.num_steps))), CASES[name]
    try:
        for step in range(JOB.num_steps):
            pipeline.progress(batches)
            if step == 3 and changed is not None and changed[0] == rank:
                _, tensor, slot = changed
                _rows_of(model, tensor).replicas.data[slot] += 1.0
            if step == 3 and name == "nan":
                _rows_of(model, "weights").homes[0] = torch.nan  # row 0 or its half's first
    except PicassoError as error:
        return f"step {step}: {error}"
    return "sound"


def _rows_of(model: Any, tensor: str) -> HomesAndReplicas:
    """Of the first pack with hot rows."""
    for module in model.modules():
        for lookup in getattr(module, "_lookups", []):
            for storage in storages_of(lookup):
                if storage.num_hot_rows:
                    tables = storage.tables
                    return tables.weights if tensor == "weights" else tables.row_states[tensor]
    raise AssertionError("there is a pack with hot rows")


def test_what_differs_is_named_on_all_ranks() -> None:
    said = run_once(_run, 2)
    assert said[0] == said[1]
    assert said[0]["sound"] == "sound"
    assert said[0]["nan"] == "sound"  # the same bits everywhere
    # slots 0 to 5 are of a, 6 to 11 of b, whose hot rows are 0, 1, 3, 4, 6, 9
    assert said[0]["weight"].startswith(
        "step 5: table 'b', row 3: the replica on rank 1 is not what its home on rank "
    )
    assert "1 on rank 1 differ" in said[0]["weight"]


def test_a_home_that_brought_its_own_replica_is_right() -> None:
    said = run_once(_run, 2)
    # row 9 of a is at home on rank 0, whose replica goes home: then rank 1's is the other one
    assert said[0]["state"].startswith("step 5: table 'a', row 9: the replica on rank 1 is not")


def test_numbers_below_one_are_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="verify_every is 0, expected at least 1"):
        InterleavedTrainPipeline(model, optimizer, torch.device("cpu"), verify_every=0)
