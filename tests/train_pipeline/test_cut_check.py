"""Models that micro-batches would make others of are found by trying; legal ones are let be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.train_pipeline import programs
from tests.train_pipeline.runs import run_to_the_end
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import CompatError
from torchrec_picasso.train_pipeline import micro_batch_policy
from torchrec_picasso.train_pipeline.micro_batch_policy import is_due


class _Legal(programs.Head):
    """A mean over samples, dropouts of all kinds, a norm over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(programs.WIDTH), nn.Dropout(0.5)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(self.drop(self.act(self.norm(self.hidden(x)))))

    def act(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(hidden), 0.25)


class _Clicked(_Legal):
    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        clicked = (batch.labels > 0.5).float()
        return ((out - batch.labels) ** 2 * clicked).sum() / clicked.sum()


def _batches(rank: int, num_steps: int) -> list[Batch]:
    return [programs.batch_of(rank, step, programs.SAMPLES) for step in range(num_steps)]


def _pipeline(model: Any, **settings: Any) -> InterleavedTrainPipeline:
    return InterleavedTrainPipeline(
        model, programs.dense_optimizer(model, lr=0.01), programs.CPU, **settings
    )


def _refused(rank: int, world_size: int) -> tuple[str, str]:
    """Only rank 1's batches show it; what does not ask for micro-batches trains whole."""
    batches = _batches(rank, 3)
    if rank == 0:
        batches = [_all_clicked(batch) for batch in batches]
    model = programs.build(programs.Model(_Clicked), ())
    before = programs.left_behind(model)
    pipeline = _pipeline(model, num_micro_batches=4)
    for _ in range(2):
        message = refusal(CompatError, pipeline.progress, iter(batches))
    torch.testing.assert_close(programs.left_behind(model), before, rtol=0, atol=0)
    automatic = _pipeline(programs.build(programs.Model(_Clicked), ()), lookahead=True)
    run_to_the_end(automatic, iter(batches))
    assert automatic.num_micro_batches == 1
    return message, automatic.summary()


def _all_clicked(batch: Batch) -> Batch:
    batch.labels = 0.5 + batch.labels / 2
    return batch


def test_a_difference_is_found_on_all_ranks_before_the_first_step() -> None:
    """More of them, compared with stock where they train whole: ``test_hostile_models.py``."""
    first, other = run_once(_refused, 2)
    assert first == other
    message, summary = first
    assert "the gradient of the output of ebc differs by" in message
    assert "use num_micro_batches=1" in message.lower()
    assert "batches are whole: " in summary.splitlines()[-1]


def _untouched(rank: int, world_size: int) -> dict[Any, Any]:
    """The same training with comparisons and without, dropouts at work."""
    results: dict[Any, Any] = {}
    for is_checked in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_checked:
                patch.setattr(micro_batch_policy, "is_due", lambda step: False)
            torch.manual_seed(7 + rank)
            model = programs.build(programs.Model(_Legal), ())
            pipeline = _pipeline(model, num_micro_batches=4, lookahead=True)
            outputs = run_to_the_end(pipeline, iter(_batches(rank, 5)))
            results[is_checked] = outputs, programs.left_behind(model), float(torch.rand(1))
    return results


def test_a_legal_model_is_trained_to_the_bit_as_without_comparisons() -> None:
    for results in run_ranks(_untouched, 2, timeout_s=120):
        torch.testing.assert_close(results[True], results[False], rtol=0, atol=0)
        assert len(results[True][0]) == 5


def _another(rank: int, world_size: int) -> str:
    """A legal model, then another one in the same pipeline."""
    pipeline = _pipeline(programs.build(programs.Model(_Legal), ()), num_micro_batches=4)
    batches = _batches(rank, 6)
    run_to_the_end(pipeline, iter(batches[:3]))
    pipeline.detach()
    pipeline.attach(programs.build(programs.Model(_Clicked), ()))
    return refusal(CompatError, pipeline.progress, iter(batches[3:]))


def test_another_model_is_looked_at_in_its_first_step() -> None:
    for message in run_ranks(_another, 2, timeout_s=60):
        assert "the gradient of the output of ebc differs" in message


class _LateClicked(_Clicked):
    """Without dropout, so that it compares with another pipeline's run."""

    def tower(self, x: Tensor) -> Tensor:
        return self.over(self.norm(self.hidden(x)))


def _late(rank: int, world_size: int) -> str:
    """All samples are clicked, until in the eighth step they are not."""
    batches = [
        _all_clicked(batch) if step < 7 else batch for step, batch in enumerate(_batches(rank, 12))
    ]
    pipeline = _pipeline(programs.build(programs.Model(_LateClicked), ()), num_micro_batches=2)
    iterator = iter(batches)
    for _ in range(7):
        pipeline.progress(iterator)
    return refusal(CompatError, pipeline.progress, iterator)


def test_a_difference_that_shows_late_is_refused_in_that_very_step() -> None:
    for message in run_ranks(_late, 2, timeout_s=120):
        assert "in 2 micro-batches the gradient of the output of ebc" in message


def test_checks_become_rare() -> None:
    assert [step for step in range(1, 300) if is_due(step)] == [1, 2, 4, 8, 16, 64, 256]
