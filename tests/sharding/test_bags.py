"""What is special about tables whose bags travel: what is sent, and what is refused.

That they train as stock TorchRec is tested where all placements are: ``test_exactness.py``,
``test_sequences.py``, ``tests/train_pipeline/test_against_stock.py``.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv

from tests.sharding.jobs import CPU, Job, Table, build, make_batch, run_jobs, whole
from tests.support.wire import Message, MessageRecorder, elements
from tests.train_pipeline.drivers import DRIVERS, Driver, make_driver
from tests.train_pipeline.runs import batches_of, run_to_the_end
from torchrec_picasso import (
    CompatError,
    HotColdEmbeddingCollectionSharder,
    HotColdParams,
    PlanError,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks

TABLES = (Table("a", 8, 60, ("f0",)), Table("b", 16, 40, ("f1", "f2"), mean=True))
"""On two ranks ``a`` is at home on rank 0 and ``b`` on rank 1."""
FEATURES_AT_HOME, DIM = {0: ["f0"], 1: ["f1", "f2"]}, {0: 8, 1: 16}
JOB = Job(placement={"*": "bags"}, tables=TABLES, batch_sizes=(20, 12), num_steps=4)
WIRE_TOLERANCE = 2e-2


def _record(rank: int, world_size: int) -> dict[Driver, list[Message]]:
    found = {}
    for driver in DRIVERS:
        pipeline = make_driver(driver, build(JOB, rank, world_size))
        run_to_the_end(pipeline, iter(batches_of(JOB, rank, range(3))))  # DDP makes its buckets
        with MessageRecorder() as recorder:
            run_to_the_end(pipeline, iter(batches_of(JOB, rank, range(JOB.num_steps))))
        found[driver] = recorder.messages
    return found


@cache
def _recorded() -> list[dict[Driver, list[Message]]]:
    return run_ranks(_record, 2, timeout_s=100)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_vector_travels_for_each_bag_and_its_gradient_back(driver: Driver) -> None:
    for rank, recorded in enumerate(_recorded()):
        other = 1 - rank
        away, mine = len(FEATURES_AT_HOME[other]), len(FEATURES_AT_HOME[rank])
        vectors = JOB.batch_size(other) * mine * DIM[rank]
        gradients = JOB.batch_size(rank) * away * DIM[other]
        sent = elements(recorded[driver], torch.float32)
        assert sent == JOB.num_steps * (vectors + gradients)


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_lookup_is_sent_once_and_each_bags_length(driver: Driver) -> None:
    for rank, recorded in enumerate(_recorded()):
        away = FEATURES_AT_HOME[1 - rank]
        lengths = [
            batch.sparse_features[name].lengths()
            for batch in batches_of(JOB, rank, range(JOB.num_steps))
            for name in away
        ]
        expected = sum(int(of_bags.sum()) + of_bags.numel() for of_bags in lengths)
        assert elements(recorded[driver], torch.int32) == expected


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_vectors_may_be_rounded_on_the_wire(wire: str) -> None:
    jobs = {"exact": JOB, "rounded": dataclasses.replace(JOB, wire=wire)}
    by_rank = run_ranks(run_jobs, 2, jobs, timeout_s=60)
    exact, rounded = ([rank[name] for rank in by_rank] for name in jobs)
    for mine, its in zip(rounded, exact):
        assert mine.losses != its.losses
        torch.testing.assert_close(mine.losses, its.losses, rtol=WIRE_TOLERANCE, atol=2e-2)
    for kind in ("weights", "states"):
        torch.testing.assert_close(
            whole(rounded, kind), whole(exact, kind), rtol=WIRE_TOLERANCE, atol=2e-2
        )


def _refused(rank: int, world_size: int) -> str:
    job = dataclasses.replace(JOB, weighted=True)
    batch = make_batch(job, rank, 0)
    batch.sparse_features.weights().requires_grad_()
    with pytest.raises(CompatError) as caught:
        build(job, rank, world_size)(batch)
    return str(caught.value)


def test_weights_that_want_gradients_are_refused() -> None:
    for told in run_ranks(_refused, 2, timeout_s=60):
        assert "want gradients" in told
        assert "form='rows'" in told


def _as_sequences(rank: int, world_size: int) -> str:
    table = EmbeddingConfig(name="t", embedding_dim=8, num_embeddings=10, feature_names=["f"])
    module = EmbeddingCollection(tables=[table], device=CPU)
    sharder = HotColdEmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        module,
        {"t": table_wise(rank=0)},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    plan["t"].cache_params = HotColdParams(form="bags")
    with pytest.raises(PlanError) as caught:
        sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU, "ebc")
    return str(caught.value)


def test_sequences_have_no_bags() -> None:
    (told,) = run_ranks(_as_sequences, 1, timeout_s=60)
    assert told.startswith("table 't' is looked up as sequences, so it has no bags")


def _in_feature_processor(rank: int, world_size: int) -> str:
    job = dataclasses.replace(JOB, weighted=True)
    model = build(job, rank, world_size)
    ebc, features = model.module.ebc, make_batch(job, rank, 0).sparse_features
    context = ebc.create_context()
    ((laid_out,),) = [ebc.input_dist(context, features).wait().wait()]
    laid_out._weights = laid_out.weights() * 2  # as a feature processor leaves it
    with pytest.raises(CompatError) as caught:
        ebc.compute_and_output_dist(context, [laid_out])
    return str(caught.value)


def test_weights_that_change_after_they_left_are_refused() -> None:
    for told in run_ranks(_in_feature_processor, 2, timeout_s=60):
        assert told.startswith("per-sample weights changed between the input dist and the lookup")
        assert "use form='rows'" in told
