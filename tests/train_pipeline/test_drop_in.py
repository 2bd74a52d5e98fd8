"""The constructor of ``TrainPipelineSparseDist``: every argument is taken, or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext

from tests.sharding.jobs import PLAIN, Job, build, dense_optimizer, result_of
from tests.support.placing import CPU
from tests.train_pipeline.runs import batches_of, compare_runs, run_to_the_end
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import CompatError
from torchrec_picasso.train_pipeline.options import REFUSED_OPTIONS, refuse_model

JOB = Job(placement={"*": 2}, tables=PLAIN)
STOCK = Job(placement={"*": "table_wise"}, tables=PLAIN)
THEIRS = inspect.signature(TrainPipelineSparseDist.__init__).parameters
OURS = inspect.signature(InterleavedTrainPipeline.__init__).parameters


def test_every_argument_of_torchrec_is_ours_in_the_same_place() -> None:
    assert len(THEIRS) >= 9
    assert list(OURS)[: len(THEIRS)] == list(THEIRS)
    for name, theirs in THEIRS.items():
        assert OURS[name].default == theirs.default, name
        assert OURS[name].kind == theirs.kind, name


def test_what_is_refused_is_an_argument_and_off_by_default() -> None:
    for name in REFUSED_OPTIONS:
        assert OURS[name].default is False
    assert "async_inplace_copy" in REFUSED_OPTIONS  # of TorchRec 1.9


@pytest.mark.parametrize("name", list(REFUSED_OPTIONS))
def test_an_argument_that_has_no_meaning_is_refused_by_name(name: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    model: Any = torch.nn.Linear(1, 1)
    with pytest.raises(CompatError, match=f"does not take {name}: .*leave it out"):
        InterleavedTrainPipeline(model, optimizer, CPU, **{name: True})


def test_a_model_in_two_dimensions_is_refused_by_name() -> None:
    model = DMPCollection.__new__(DMPCollection)
    torch.nn.Module.__init__(model)
    model._dmp_wrapped_module = torch.nn.Linear(1, 1)
    with pytest.raises(CompatError, match=r"a DMPCollection.* Use TrainPipelineSparseDist"):
        refuse_model(model)


class _Context(TrainPipelineContext):
    pass


def _forward_of(model: DistributedModelParallel) -> Any:
    """Half of the model's loss, as a function of the user's."""

    def forward(batch: Batch | None) -> tuple[Tensor, Tensor]:
        loss, output = model(batch)
        return loss / 2, output + 1

    return forward


class _Batch(Batch):
    """Takes the stream that a copy in place is made on."""

    copies = 0

    def to(self, device: Any, non_blocking: bool = False, data_copy_stream: Any = None) -> _Batch:
        type(self).copies += 1
        return self


def _options_of(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    batches = batches_of(JOB, rank, range(6))
    for num_micro_batches in (None, 1, 3):
        job, kind, settings = STOCK, TrainPipelineSparseDist, dict[str, Any]()
        if num_micro_batches is not None:
            job, kind = JOB, InterleavedTrainPipeline
            settings = {"num_micro_batches": num_micro_batches, "loss_reduction": "sum"}
        for name in ("custom_model_fwd", "others"):
            model = build(job, rank, world_size)
            options: dict[str, Any] = {"custom_model_fwd": _forward_of(model)}
            if name == "others":
                options = {
                    "context_type": _Context,
                    "dmp_collection_sync_interval_batches": None,
                    "pipeline_postproc": True,
                }
            pipeline = kind(model, dense_optimizer(model), CPU, True, **options, **settings)
            outputs = run_to_the_end(pipeline, iter(batches))
            pipeline.detach()  # its wrapper works as before
            loss, _ = model(batches[0])
            loss.backward()
            results[name, num_micro_batches] = result_of(model, []), outputs
    return results


def test_a_custom_forward_and_contexts_train_as_in_torchrec() -> None:
    by_rank = run_ranks(_options_of, 2, timeout_s=60)
    for name in ("custom_model_fwd", "others"):
        for num_micro_batches in (1, 3):
            compare_runs(by_rank, (name, num_micro_batches), (name, None))


def _in_place(rank: int, world_size: int) -> int:
    model = build(JOB, rank, world_size)
    pipeline = InterleavedTrainPipeline(
        model, dense_optimizer(model), CPU, enable_inplace_copy_batch=True, num_micro_batches=1
    )
    batches = [_Batch(**vars(batch)) for batch in batches_of(JOB, rank, range(3))]
    assert len(run_to_the_end(pipeline, iter(batches))) == 3
    assert dist.get_world_size() == world_size
    return _Batch.copies


def test_batches_are_copied_in_place_where_asked_for() -> None:
    assert run_ranks(_in_place, 2, timeout_s=60) == [3, 3]
