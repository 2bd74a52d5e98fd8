"""A refused batch leaves nothing behind; placements that cannot be hot/cold are refused by name."""

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_picasso as picasso
from tests.sharding.jobs import Job, build, dense_optimizer, make_batch, replicas_of, train
from tests.support.placing import CPU, place, wire_codecs, world_env
from tests.support.refusals import refusal
from tests.support.tables import Table, bags_of
from tests.train_pipeline.feature_cells import Feature, batch_of, own_rows
from tests.train_pipeline.feature_cells import build as build_cell
from tests.train_pipeline.runs import pipeline_of
from torchrec_picasso.app.launch.run_ranks import run_ranks

JOB = Job(placement={"*": 2}, num_steps=4)
ROWS = {"f0": 60, "f1": 12, "f2": 12, "f3": 6}
"""Rows of the table that each feature of ``JOB`` looks up."""


def _with(features: KeyedJaggedTensor, place: int, **changed: float) -> KeyedJaggedTensor:
    """The same features with another ``id`` or ``weight`` at a place."""
    ids, weights = features.values().clone(), features.weights_or_none()
    if "id" in changed:
        ids[place] = int(changed["id"])
    if "weight" in changed:
        weights = features.weights().clone()
        weights[place] = changed["weight"]
    return KeyedJaggedTensor(
        keys=features.keys(), values=ids, weights=weights, lengths=features.lengths()
    )


def _last_of(features: KeyedJaggedTensor, feature: str) -> int:
    return features.offset_per_key()[features.keys().index(feature) + 1] - 1


def _refused_batches(rank: int, world_size: int) -> tuple[list[str], Any, Any]:
    """Every feature in turn has a bad id on rank 1, then on all ranks; good steps in between."""
    model, messages, losses = build(JOB, rank, world_size), [], []
    for step, (feature, rows) in enumerate(ROWS.items()):
        losses += train(model, JOB, rank, [step])
        for bad_ranks in ([1], range(world_size)):
            batch = make_batch(JOB, rank, step)
            if rank in bad_ranks:
                last = _last_of(batch.sparse_features, feature)
                batch.sparse_features = _with(batch.sparse_features, last, id=rows + rank)
            messages.append(refusal(picasso.InputError, model, batch))
    undisturbed = build(JOB, rank, world_size)
    expected = train(undisturbed, JOB, rank, range(len(ROWS))), replicas_of(undisturbed)
    return messages, (losses, replicas_of(model)), expected


def test_training_goes_on_after_a_refused_batch() -> None:
    for rank, (messages, disturbed, undisturbed) in enumerate(
        run_ranks(_refused_batches, 2, timeout_s=60)
    ):
        torch.testing.assert_close(disturbed, undisturbed, rtol=0, atol=0)
        for (feature, rows), alone, together in zip(ROWS.items(), messages[::2], messages[1::2]):
            own = f"feature {feature!r} looks up row {rows + rank} of table "
            assert together.startswith(own)
            assert f"whose rows are 0..{rows - 1}; 1 such ids" in together
            assert alone.startswith(own if rank == 1 else "rank 1 holds 1 ids outside their tables")


BadValue = tuple[dict[str, Any], dict[str, float], str]


def _bad_id(row: int, place: int | str = 2, **changes: Any) -> BadValue:
    message = f"feature 'f0' looks up row {row} of table 'a', whose rows are 0..59"
    return {"placement": {"*": 2, "a": place}, **changes}, {"id": row}, message


def _bad_weight(weight: float, place: int | str) -> BadValue:
    message = f"feature 'f0' of table 'a' has per-sample weight {weight}"
    return {"placement": {"*": place}, "weighted": True}, {"weight": weight}, message


BAD_VALUES: dict[str, BadValue] = {
    "just outside": _bad_id(60),
    "negative": _bad_id(-1),
    "huge": _bad_id(2**40),
    "just outside, bags": _bad_id(60, "bags"),
    "negative, bags": _bad_id(-1, "bags"),
    "beside an empty batch": _bad_id(-7, batch_sizes=(0, 6)),
    "no number": _bad_weight(float("nan"), 2),
    "endless, bags": _bad_weight(float("inf"), "bags"),
}
"""Changes of the job, what rank 1 holds, and what it says."""


def _bad_values(rank: int, world_size: int) -> dict[str, str]:
    """A good step first, then one in which rank 1 holds a bad id or weight."""
    messages = {}
    for name, (changes, values, _) in BAD_VALUES.items():
        job = dataclasses.replace(JOB, **changes)
        model = build(job, rank, world_size)
        train(model, job, rank, [0])
        batch = make_batch(job, rank, 1)
        if rank == 1:
            batch.sparse_features = _with(batch.sparse_features, 3, **values)
        messages[name] = refusal(picasso.InputError, model, batch)
    return messages


def test_a_bad_id_or_weight_is_named_on_all_ranks() -> None:
    on_rank_0, on_rank_1 = run_ranks(_bad_values, 2, timeout_s=100)
    for name, (_, values, own) in BAD_VALUES.items():
        assert own in on_rank_1[name], name
        kind = (
            "ids outside their tables"
            if "id" in values
            else "per-sample weights that are not finite"
        )
        assert f"rank 1 holds 1 {kind}" in on_rank_0[name], name


CHANGED_ON_THE_WAY = {
    "a stock table beside": Feature("another order", hot_rows={"*": 2, "t_b": None}),
    "processors": Feature("processors", ("bags",), processors="all"),
    "own rows": Feature("own rows", change_batch=own_rows),
    "own rows, weighted": Feature("own rows", change_batch=own_rows, weighted=True),
}
"""Features that TorchRec or we reorder, wrap, pad or weight between the batch and the request."""


WRONG = ("ids of type torch.float32", "lengths that sum to ", "a length of -")


def _bad_lengths(rank: int, world_size: int) -> dict[Any, str]:
    """On rank 1 a sum that does not fit, one that does, with a length below 0, and ids (change 0)
    that are no integers."""
    messages = {}
    for name, feature in CHANGED_ON_THE_WAY.items():
        for kind, change, num_micro_batches in product(feature.kinds, (2, -20, 0), (0, 1)):
            batch = batch_of(feature, rank, 0, is_ours=True)
            if rank == 1:
                lengths = batch.sparse_features.lengths()
                lengths[0] += change
                lengths[1] -= min(change, 0)
                ids = batch.sparse_features.values()
                batch.sparse_features._values = ids if change else ids.float()
            model = build_cell(feature, kind, is_ours=True)
            pipeline: Any = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
            if num_micro_batches:
                pipeline = pipeline_of(model, num_micro_batches=num_micro_batches)
            case = name, kind, num_micro_batches, change
            messages[case] = refusal(picasso.InputError, pipeline.progress, iter([batch]))
    return messages


def test_lengths_are_looked_at_before_anybody_changes_features() -> None:
    on_rank_0, on_rank_1 = run_ranks(_bad_lengths, 2, timeout_s=60)
    assert len(on_rank_1) == 6 * 7
    for (*case, change), message in on_rank_1.items():
        why = WRONG[(change > 0) - (change < 0)]
        assert f"features f, g, h has {why}" in message, case
    assert all(
        message.startswith("rank 1 holds lengths that do not") for message in on_rank_0.values()
    )


def _shard(
    way: Any,
    dim: int = 8,
    wire: str | None = None,
    kernel: str = "fused",
    params: picasso.HotColdParams | None = None,
) -> object:
    """Shards a collection of one marked table ``t``."""
    module = bags_of([Table("t", dim, 10, ("f",))])
    sharder = picasso.HotColdEmbeddingBagCollectionSharder(qcomm_codecs_registry=wire_codecs(wire))
    plan = place(module, sharder, {"t": way}, {"t": params or picasso.HotColdParams(hot_rows=[0])})
    plan["t"].compute_kernel = kernel
    return sharder.shard(module, plan, world_env(), CPU, "tables")


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    messages = {}
    for name, how in {
        "table-wise": {"way": table_wise(rank=0)},
        "bags row-wise": {"way": row_wise(), "params": picasso.HotColdParams(form="bags")},
        "too many": {"way": row_wise(), "params": picasso.HotColdParams(hot_rows=range(11))},
        "outside": {"way": row_wise(), "params": picasso.HotColdParams(hot_rows=[100])},
        "kernel": {"way": row_wise(), "kernel": "fused_uvm_caching"},
        "dim": {"way": row_wise(), "dim": 6},
        "wire": {"way": row_wise(), "wire": "int8"},
    }.items():
        with pytest.raises((picasso.PlanError, picasso.CompatError)) as caught:
            _shard(**how)
        messages[name] = f"{type(caught.value).__name__}: {caught.value}"
    return messages


def test_refused_placements() -> None:
    (message,) = run_ranks(_refusals, 1, timeout_s=60)
    assert message == {
        "table-wise": "PlanError: table 't' carries HotColdParams(form='rows') but is placed "
        "'table_wise'; hot/cold tables of this form are placed 'row_wise'",
        "bags row-wise": "PlanError: table 't' carries HotColdParams(form='bags') but is placed "
        "'row_wise'; hot/cold tables of this form are placed 'table_wise'",
        "too many": "PlanError: table 't' has 10 rows, but 11 hot rows were requested; request at "
        "most 10",
        "outside": "PlanError: hot row 100 lies outside table 't', whose rows are 0..9; choose hot "
        "rows for this model",
        "kernel": "CompatError: hot/cold table 't' has compute kernel 'fused_uvm_caching'; use "
        "one of 'fused', 'fused_uvm'",
        "dim": "CompatError: hot/cold table 't' has embedding_dim 6; FBGEMM needs a multiple of 4",
        "wire": "CompatError: the wire precision torch.uint8 of SEQUENCE_EMBEDDINGS_ALL_TO_ALL is "
        "not supported for hot/cold tables; use CommType.FP32, FP16 or BF16",
    }
