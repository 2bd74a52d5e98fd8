"""``KTRegroupAsDict`` under the pipeline: the same values and training, by a copy instead."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor

from tests.sharding.jobs import PLAIN, Job, build, dense_optimizer, result_of
from tests.support.placing import CPU
from tests.train_pipeline.runs import batches_of, compare_runs, run_to_the_end
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.train_pipeline.rewrite import regroup

OURS = Job(placement={"*": 2}, tables=PLAIN, regrouped=True)
STOCK = Job(placement={"*": "table_wise"}, tables=PLAIN, regrouped=True)
THEIRS = "fbgemm::permute_multi_embedding"
GROUPS = [["c", "a"], ["d"], ["b"]]
UNUSED = slice(16, 20)


def keyed_tensors() -> list[KeyedTensor]:
    torch.manual_seed(0)
    return [
        KeyedTensor(["a", "b"], [4, 8], torch.randn(5, 12, requires_grad=True)),
        KeyedTensor(["c", "d", "unused"], [12, 4, 4], torch.randn(5, 20, requires_grad=True)),
    ]


@pytest.mark.parametrize("dtype", [None, DataType.FP16])
def test_values_and_gradients_are_theirs(dtype: DataType | None) -> None:
    module = KTRegroupAsDict(GROUPS, ["x", "y", "z"], emb_dtype=dtype)
    found = []
    for forward in (module, lambda given: regroup(module, given)):
        given = keyed_tensors()
        output = forward(given)
        sum((of.float() ** 2).sum() for of in output.values()).backward()
        found.append([output, [of.values().grad for of in given]])
    # no group takes them: FBGEMM leaves whatever was in memory for their gradients
    assert not found[1][1][1][:, UNUSED].any()
    for _, (_, grads) in found:
        grads[:, UNUSED] = 0
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_what_they_refuse_is_refused() -> None:
    module = KTRegroupAsDict([["a", "missing"]], ["x"])
    for forward in (module, lambda given: regroup(module, given)):
        with pytest.raises(KeyError, match="missing"):
            forward(keyed_tensors())


def _train(rank: int, world_size: int) -> dict[int, Any]:
    results: dict[int, Any] = {}
    for num_micro_batches in (0, 1, 3):
        job = OURS if num_micro_batches else STOCK
        batches = batches_of(job, rank, range(5))
        model = build(job, rank, world_size)
        optimizer = dense_optimizer(model)
        pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU)
        if num_micro_batches:
            settings = {"num_micro_batches": num_micro_batches, "loss_reduction": "sum"}
            pipeline = InterleavedTrainPipeline(model, optimizer, CPU, **settings)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            outputs = run_to_the_end(pipeline, iter(batches))
        is_theirs = any(event.key == THEIRS for event in profiler.key_averages())
        assert is_theirs == (num_micro_batches == 0)
        pipeline.detach()
        (module,) = (of for of in model.modules() if isinstance(of, KTRegroupAsDict))
        assert "forward" not in vars(module)
        loss, _ = model(batches[0])
        loss.backward()
        results[num_micro_batches] = result_of(model, []), outputs
    return results


def test_a_model_that_regroups_trains_as_under_stock() -> None:
    by_rank = run_ranks(_train, 2, timeout_s=120)
    for num_micro_batches in (1, 3):
        compare_runs(by_rank, num_micro_batches, 0)
