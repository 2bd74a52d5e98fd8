"""What is special about tables whose bags travel: what is sent, and what is refused.

That they train as stock TorchRec is tested where all placements are: ``test_exactness.py``,
``test_sequences.py``, ``tests/train_pipeline/test_against_stock.py``.
"""

import dataclasses

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.sharding_plan import table_wise

from tests.sharding.jobs import Job, Table, build, make_batch
from tests.support.placing import CPU, place, world_env
from tests.support.shared_run import run_once
from tests.support.wire import Message, MessageRecorder, elements
from tests.train_pipeline.drivers import DRIVERS, Driver, make_driver
from tests.train_pipeline.runs import batches_of, run_to_the_end
from torchrec_picasso import (
    CompatError,
    HotColdEmbeddingCollectionSharder,
    HotColdParams,
    PlanError,
)

TABLES = (Table("a", 8, 60, ("f0",)), Table("b", 16, 40, ("f1", "f2"), mean=True))
"""On two ranks ``a`` is at home on rank 0 and ``b`` on rank 1."""
FEATURES_AT_HOME, DIM = {0: ["f0"], 1: ["f1", "f2"]}, {0: 8, 1: 16}
JOB = Job(placement={"*": "bags"}, tables=TABLES, batch_sizes=(20, 12), num_steps=4)


def _record(rank: int, world_size: int) -> dict[Driver, list[Message]]:
    found = {}
    for driver in DRIVERS:
        pipeline = make_driver(driver, build(JOB, rank, world_size))
        run_to_the_end(pipeline, iter(batches_of(JOB, rank, range(3))))  # DDP makes its buckets
        with MessageRecorder() as recorder:
            run_to_the_end(pipeline, iter(batches_of(JOB, rank, range(JOB.num_steps))))
        found[driver] = recorder.messages
    return found


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_vector_travels_for_each_bag_and_its_gradient_back(driver: Driver) -> None:
    for rank, recorded in enumerate(run_once(_record, 2)):
        other = 1 - rank
        away, mine = len(FEATURES_AT_HOME[other]), len(FEATURES_AT_HOME[rank])
        vectors = JOB.batch_size(other) * mine * DIM[rank]
        gradients = JOB.batch_size(rank) * away * DIM[other]
        sent = elements(recorded[driver], torch.float32)
        assert sent == JOB.num_steps * (vectors + gradients)


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_lookup_is_sent_once_and_each_bags_length(driver: Driver) -> None:
    for rank, recorded in enumerate(run_once(_record, 2)):
        away = FEATURES_AT_HOME[1 - rank]
        lengths = [
            batch.sparse_features[name].lengths()
            for batch in batches_of(JOB, rank, range(JOB.num_steps))
            for name in away
        ]
        expected = sum(int(of_bags.sum()) + of_bags.numel() for of_bags in lengths)
        assert elements(recorded[driver], torch.int32) == expected


def _refused(rank: int, world_size: int) -> dict[str, str]:
    told = {}
    job = dataclasses.replace(JOB, weighted=True)
    batch = make_batch(job, rank, 0)
    batch.sparse_features.weights().requires_grad_()
    with pytest.raises(CompatError) as caught:
        build(job, rank, world_size)(batch)
    told["weights that want gradients"] = str(caught.value)

    ebc, features = build(job, rank, world_size).module.ebc, make_batch(job, rank, 0)
    context = ebc.create_context()
    ((laid_out,),) = [ebc.input_dist(context, features.sparse_features).wait().wait()]
    laid_out._weights = laid_out.weights() * 2  # as a feature processor leaves it
    with pytest.raises(CompatError) as caught:
        ebc.compute_and_output_dist(context, [laid_out])
    told["weights that changed"] = str(caught.value)

    table = EmbeddingConfig(name="t", embedding_dim=8, num_embeddings=10, feature_names=["f"])
    module = EmbeddingCollection(tables=[table], device=CPU)
    sharder = HotColdEmbeddingCollectionSharder()
    plan = place(module, sharder, {"t": table_wise(rank=0)}, {"t": HotColdParams(form="bags")})
    with pytest.raises(PlanError) as caught:
        sharder.shard(module, plan, world_env(), CPU, "ec")
    told["sequences"] = str(caught.value)
    return told


def test_what_has_no_bags_or_other_weights_is_refused() -> None:
    for told in run_once(_refused, 2):
        assert "want gradients" in told["weights that want gradients"]
        assert "form='rows'" in told["weights that want gradients"]
        assert told["weights that changed"].startswith(
            "per-sample weights changed between the input dist and the lookup"
        )
        assert "use form='rows'" in told["weights that changed"]
        assert told["sequences"].startswith(
            "table 't' is looked up as sequences, so it has no bags"
        )
