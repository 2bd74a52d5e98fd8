"""A refused batch leaves nothing behind; placements that cannot be hot/cold are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.sharding.jobs import CPU, Job, build, dense_optimizer, make_batch, replicas_of, train
from tests.train_pipeline.feature_cells import Feature, batch_of, own_rows
from tests.train_pipeline.feature_cells import build as build_cell
from tests.train_pipeline.runs import pipeline_of
from torchrec_picasso import (
    CompatError,
    HotColdEmbeddingBagCollectionSharder,
    HotColdParams,
    InputError,
    PlanError,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks

JOB = Job(placement={"*": 2}, num_steps=4)
ROWS = {"f0": 60, "f1": 12, "f2": 12, "f3": 6}
"""Rows of the table that each feature of ``JOB`` looks up."""


def _with_id(features: KeyedJaggedTensor, feature: str, row: int) -> KeyedJaggedTensor:
    """The same batch, in which the last lookup of ``feature`` is ``row``."""
    ids = features.values().clone()
    end = features.offset_per_key()[features.keys().index(feature) + 1]
    ids[end - 1] = row
    return KeyedJaggedTensor(keys=features.keys(), values=ids, lengths=features.lengths())


def _refused_batches(rank: int, world_size: int) -> tuple[list[str], list[float], list[Any]]:
    """Every feature in turn has a bad id on rank 1, then on all ranks; good steps in between."""
    model = build(JOB, rank, world_size)
    told, losses = [], []
    for step, (feature, rows) in enumerate(ROWS.items()):
        losses += train(model, JOB, rank, [step])
        for bad_ranks in ([1], range(world_size)):
            batch = make_batch(JOB, rank, step)
            if rank in bad_ranks:
                batch.sparse_features = _with_id(batch.sparse_features, feature, rows + rank)
            with pytest.raises(InputError) as caught:
                model(batch)
            told.append(str(caught.value))
    return told, losses, replicas_of(model)


def _undisturbed(rank: int, world_size: int) -> tuple[list[float], list[Any]]:
    model = build(JOB, rank, world_size)
    return train(model, JOB, rank, range(len(ROWS))), replicas_of(model)


def test_training_goes_on_after_a_refused_batch() -> None:
    disturbed = run_ranks(_refused_batches, 2, timeout_s=60)
    undisturbed = run_ranks(_undisturbed, 2, timeout_s=60)
    for rank, ((told, losses, replicas), expected) in enumerate(zip(disturbed, undisturbed)):
        assert losses == expected[0]
        assert all(map(torch.equal, replicas, expected[1]))
        for (feature, rows), alone, together in zip(ROWS.items(), told[::2], told[1::2]):
            own = f"feature {feature!r} looks up row {rows + rank} of table "
            assert together.startswith(own)
            assert f"whose rows are 0..{rows - 1}; 1 such ids" in together
            assert alone.startswith(own if rank == 1 else "rank 1 holds 1 ids outside their tables")


def _bad_id_beside_an_empty_batch(rank: int, world_size: int) -> str:
    job = dataclasses.replace(JOB, batch_sizes=(0, 6))
    model = build(job, rank, world_size)
    batch = make_batch(job, rank, 0)
    if rank == 1:
        batch.sparse_features = _with_id(batch.sparse_features, "f3", -7)
    with pytest.raises(InputError) as caught:
        model(batch)
    return str(caught.value)


def test_a_rank_without_data_hears_of_it_too() -> None:
    told_0, told_1 = run_ranks(_bad_id_beside_an_empty_batch, 2, timeout_s=60)
    assert "feature 'f3' looks up row -7 of table 'c', whose rows are 0..5" in told_1
    assert "rank 1 holds 1 ids outside their tables" in told_0


def _bad_lengths_beside_a_stock_table(rank: int, world_size: int) -> list[str]:
    """Lengths of rank 1 that do not fit, for features that are put in another order.

    By the plain loop, then by a pipeline, whose first batch they are.
    """
    job = dataclasses.replace(JOB, placement={"*": 2, "a": "table_wise"})
    told = []
    for change in (2, -20):
        batch = make_batch(job, rank, 0)
        if rank == 1:
            given = batch.sparse_features
            lengths = given.lengths().clone()
            lengths[0] += change
            lengths[1] -= min(change, 0)  # the second time the sum is right
            batch.sparse_features = KeyedJaggedTensor(
                keys=given.keys(), values=given.values(), lengths=lengths
            )
        model = build(job, rank, world_size)
        with pytest.raises(InputError) as caught:
            model(batch)
        told.append(str(caught.value))
        train(model, job, rank, range(2))  # nobody is left waiting
        pipeline = pipeline_of(build(job, rank, world_size), lookahead=False)
        with pytest.raises(InputError) as caught:
            pipeline.progress(iter([batch]))
        told.append(str(caught.value))
    return told


def test_lengths_are_looked_at_before_features_are_put_in_order() -> None:
    told_0, told_1 = run_ranks(_bad_lengths_beside_a_stock_table, 2, timeout_s=60)
    whose = "the KeyedJaggedTensor of features f0, f1, f2, f3 has "
    assert all(told.startswith(f"{whose}lengths that sum to ") for told in told_1[:2])
    assert all(told.startswith(f"{whose}a length of -") for told in told_1[2:])
    assert all(told.startswith("rank 1 holds lengths that do not fit") for told in told_0)


CHANGED_ON_THE_WAY = {
    "processors": Feature("processors", ("bags",), processors="all"),
    "own rows": Feature("own rows", change_batch=own_rows),
    "own rows, weighted": Feature("own rows", change_batch=own_rows, weighted=True),
}
"""Features that TorchRec or we wrap, pad or weight between the batch and the request."""


def _bad_lengths_changed_on_the_way(rank: int, world_size: int) -> dict[str, str]:
    told = {}
    for name, feature in CHANGED_ON_THE_WAY.items():
        for kind, change, num_micro_batches in product(feature.kinds, (2, -20), (0, 1)):
            batch = batch_of(feature, rank, 0, is_ours=True)
            if rank == 1:
                batch.sparse_features.lengths()[0] += change
            model = build_cell(feature, kind, is_ours=True)
            pipeline: Any = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
            if num_micro_batches:
                pipeline = pipeline_of(model, num_micro_batches=num_micro_batches)
            with pytest.raises(InputError) as caught:
                pipeline.progress(iter([batch]))
            told[f"{name}, {kind}, {change}, {num_micro_batches}"] = str(caught.value)
    return told


def test_lengths_are_looked_at_before_anybody_changes_features() -> None:
    told_0, told_1 = run_ranks(_bad_lengths_changed_on_the_way, 2, timeout_s=60)
    assert len(told_1) == 4 * 5
    assert all("features f, g, h has lengths that sum to " in told for told in told_1.values())
    assert all(told.startswith("rank 1 holds lengths that do not") for told in told_0.values())


def _plan(
    generator: Any, compute_kernel: str = "fused", **params: Any
) -> EmbeddingModuleShardingPlan:
    """A plan of one marked table ``t``."""
    plan = construct_module_sharding_plan(
        _collection(8),
        {"t": generator},
        sharder=HotColdEmbeddingBagCollectionSharder(),
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    plan["t"].cache_params = HotColdParams(**(params or {"hot_rows": [0]}))
    plan["t"].compute_kernel = compute_kernel
    return plan


def _collection(dim: int) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(name="t", embedding_dim=dim, num_embeddings=10, feature_names=["f"])
    return EmbeddingBagCollection(tables=[table], device=torch.device("cpu"))


def _shard(
    plan: EmbeddingModuleShardingPlan, dim: int = 8, wire: CommType | None = None
) -> Callable[[], object]:
    registry = None
    if wire is not None:
        config = QCommsConfig(forward_precision=wire, backward_precision=CommType.FP32)
        registry = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    sharder = HotColdEmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return lambda: sharder.shard(_collection(dim), plan, env, torch.device("cpu"), "tables")


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    told = {}
    for name, shard in {
        "table-wise": _shard(_plan(table_wise(rank=0))),
        "bags row-wise": _shard(_plan(row_wise(), form="bags")),
        "kernel": _shard(_plan(row_wise(), "fused_uvm_caching")),
        "dim": _shard(_plan(row_wise()), dim=6),
        "wire": _shard(_plan(row_wise()), wire=CommType.INT8),
    }.items():
        with pytest.raises((PlanError, CompatError)) as caught:
            shard()
        told[name] = f"{type(caught.value).__name__}: {caught.value}"
    return told


def test_refused_placements() -> None:
    (told,) = run_ranks(_refusals, 1, timeout_s=60)
    assert told == {
        "table-wise": "PlanError: table 't' carries HotColdParams(form='rows') but is placed "
        "'table_wise'; hot/cold tables of this form are placed 'row_wise'",
        "bags row-wise": "PlanError: table 't' carries HotColdParams(form='bags') but is placed "
        "'row_wise'; hot/cold tables of this form are placed 'table_wise'",
        "kernel": "CompatError: hot/cold table 't' has compute kernel 'fused_uvm_caching'; use "
        "one of 'fused', 'fused_uvm'",
        "dim": "CompatError: hot/cold table 't' has embedding_dim 6; FBGEMM needs a multiple of 4",
        "wire": "CompatError: the wire precision torch.uint8 of SEQUENCE_EMBEDDINGS_ALL_TO_ALL is "
        "not supported for hot/cold tables; use CommType.FP32, FP16 or BF16",
    }
