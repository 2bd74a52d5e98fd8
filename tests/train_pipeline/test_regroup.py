"""``KTRegroupAsDict`` under the pipeline: the same values and training, by a copy instead."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor

from tests.train_pipeline.feature_cells import batch_of, build, dense_optimizer
from tests.train_pipeline.features import FEATURES
from tests.train_pipeline.runs import pipeline_of, run_to_the_end
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.train_pipeline.rewrite import regroup

(FEATURE,) = (feature for feature in FEATURES if feature.name == "KTRegroupAsDict")
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
        sum((each.float() ** 2).sum() for each in output.values()).backward()
        found.append([output, [each.values().grad for each in given]])
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


def _operators(rank: int, world_size: int) -> list[bool]:
    """Whether FBGEMM's operator runs under the pipeline, and after it."""
    model = build(FEATURE, "bags", is_ours=True)
    pipeline = pipeline_of(model, optimizer=dense_optimizer(model), num_micro_batches=3)
    batches = [batch_of(FEATURE, rank, step, is_ours=True) for step in range(2)]
    found = []
    for run in (lambda: run_to_the_end(pipeline, iter(batches)), lambda: model(batches[0])):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run()
        found.append(any(event.key == THEIRS for event in profiler.key_averages()))
        pipeline.detach()
    return found


def test_a_model_regroups_by_ours_within_the_pipeline_alone() -> None:
    """A line of ``docs/features.md`` says that it trains as under stock."""
    assert run_ranks(_operators, 2, timeout_s=120) == [[False, True]] * 2
