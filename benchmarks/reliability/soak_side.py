"""One side of the soak on one rank: its plan, its training of the small model, and its results."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks.reliability.process_figures import FIGURES, Held, figures, held
from benchmarks.reliability.small_trainer import OURS, SmallTrainer
from benchmarks.reliability.soak_batches import Feed, Stretch, counts_nothing
from benchmarks.reliability.whole_state import differences, join_state
from torchrec_picasso import InterleavedTrainPipeline, PicassoError, Refresh
from torchrec_picasso.app.checkpoints.load import load_checkpoint
from torchrec_picasso.app.checkpoints.writer import CheckpointWriter
from torchrec_picasso.app.config import CheckpointConfig
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.exchange_step import local_tensors
from torchrec_picasso.ops.streams import kept_by_stream
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.sharding.table_sharding import HotColdEmbeddingSharding
from torchrec_picasso.train_pipeline.hot_sets import check_replicas

REFRESH = Refresh(every_steps=20, half_life_steps=20, deviations=1.0)
OPTIMIZER = "rowwise_adagrad"

Plant = Callable[[int, SmallTrainer], None]
"""Called after each step, with its number, to do something that has to be found."""

_EVALUATION = Stretch(start=10_000_000, num_steps=4, index=0)
_WARM_AFTER = 2
"""Stretches; by then both ways to write a checkpoint, a reload and an evaluation have been."""
_SAY_EVERY = 250


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a side: its training, and the steps of evaluations, checkpoints and looks.

    Args:
        placement: One of ``small_trainer.PLANS``; a stock one is trained by TorchRec's pipeline.
        steps: Training steps.
        stretch: Steps between two ends of data; an evaluation follows each, and half-way a
            checkpoint is written.
        sample_every: Steps between two looks at the process.
        verify_every: Steps between two comparisons of replicas with homes.
        num_micro_batches: Micro-batches of the pipeline.
    """

    placement: str
    steps: int
    stretch: int
    sample_every: int
    verify_every: int
    num_micro_batches: int | None = None

    def stretches(self) -> Iterator[Stretch]:
        """All of them; the last may be shorter."""
        for index, start in enumerate(range(0, self.steps, self.stretch)):
            yield Stretch(start, min(self.stretch, self.steps - start), index)


@dataclass(kw_only=True)
class Found:
    """Results of a side on one rank; plain data and CPU tensors.

    Args:
        errors: Sum of squared errors, and samples, of this rank in each step: ``(steps, 2)``.
        evaluations: Sum of squared errors, and samples, of each evaluation.
        samples: Steps trained, then :data:`FIGURES`, a line per look: ``(looks, 7)``.
    """

    errors: Tensor
    samples: Tensor
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ends: list[int] = field(default_factory=list)
    """Steps of each stretch before ``StopIteration``."""
    reloads_unlike: list[str] = field(default_factory=list)
    differing_homes: str = ""
    setting: str = ""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Weights and optimizer state at the end; on rank 0."""
    held: dict[str, Held] = field(default_factory=dict)
    """Descriptors and threads ``before`` a model was made, when ``warm``, at the ``end`` of
    training, and ``after`` pipeline, model and process group are gone."""
    tensors_kept: int = 0
    """Tensors that are alive then, beside those in here."""
    alive_after: list[str] = field(default_factory=list)
    """Objects of pipeline and model that are not gone."""
    seconds: float = 0.0


def train_side(
    rank: int, world_size: int, plan: Plan, folder: str, plant: Plant | None = None
) -> Found:
    """Trains one side. Collective."""
    quiet_upstream()
    num_looks = plan.steps // plan.sample_every
    found = Found(
        errors=torch.zeros(plan.steps, 2, dtype=torch.float64),
        samples=torch.zeros(num_looks, 1 + len(FIGURES), dtype=torch.float64),
    )
    constants = _constants()
    gc.freeze()  # what is imported is not looked at again
    found.held["before"] = held()
    start_s = time.perf_counter()
    side = _Side(plan, Path(folder), found, plant)
    side.train()
    found.seconds = time.perf_counter() - start_s
    parts = {"pipeline": weakref.ref(side.pipeline), "model": weakref.ref(side.trainer.model)}
    del side
    gc.collect()
    found.alive_after = [name for name, part in parts.items() if part() is not None]
    _leave(Path(folder), rank, world_size)
    found.held["after"] = held()
    for cache in constants:
        cache.cache_clear()
    own = 2 + len(found.state)  # errors and samples
    found.tensors_kept = int(figures()[FIGURES.index("tensors")]) - own
    return found


def _constants() -> list[Any]:
    """Caches of constants that the process keeps for all models."""
    gc.unfreeze()  # imports of ranks are frozen
    module = kept_by_stream.__module__
    caches = (each for each in gc.get_objects() if type(each) is type(lru_cache(int)))
    return [cache for cache in caches if cache.__module__ == module]


def _leave(folder: Path, rank: int, world_size: int) -> None:
    """Ends the process group; no rank leaves while another is still in a collective."""
    dist.barrier()
    store = dist.FileStore(str(folder / "left"), world_size)
    store.set(str(rank), "")
    store.wait([str(other) for other in range(world_size)])
    dist.destroy_process_group()


class _Side:
    """The small model in training. Collective, as are its methods."""

    def __init__(self, plan: Plan, folder: Path, found: Found, plant: Plant | None) -> None:
        self._plan, self._found, self._plant = plan, found, plant
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._is_ours = plan.placement in OURS
        self.trainer = SmallTrainer(plan.placement, OPTIMIZER)
        parts: Any = self.trainer.model, self.trainer.optimizer, torch.device("cpu")
        self.pipeline: TrainPipelineSparseDist[Any, Any] = (
            InterleavedTrainPipeline(
                *parts,
                refresh=REFRESH,
                verify_every=plan.verify_every,
                num_micro_batches=plan.num_micro_batches,
            )
            if self._is_ours
            else TrainPipelineSparseDist(*parts, custom_model_fwd=self._forward)
        )
        self._folder = folder
        self._writers = [
            CheckpointWriter(
                CheckpointConfig(folder=str(folder), keep_last=2, async_save=is_async), _silent
            )
            for is_async in (False, True)
        ]
        self._seen: Any = None

    def train(self) -> None:
        """Trains all stretches."""
        for stretch in self._plan.stretches():
            self._train(stretch)
            self._evaluate()
            self._finish_checkpoints()
            if stretch.index + 1 == _WARM_AFTER:
                self._found.held["warm"] = held()
        self._found.held["end"] = held()
        self._found.differing_homes = self._why_unlike_homes()
        self._found.state = join_state(self.trainer.state())
        if isinstance(self.pipeline, InterleavedTrainPipeline):
            self._found.setting = self.pipeline.summary().splitlines()[-1]

    def _train(self, stretch: Stretch) -> None:
        self.trainer.model.train()
        step = stretch.start
        for error, samples in self._outcomes(stretch):
            self._found.errors[step, 0], self._found.errors[step, 1] = error, samples
            step += 1
            self._found.counts["samples"] += samples
            self._note_refresh()
            if self._plant is not None:
                self._plant(step, self.trainer)
            if step - stretch.start == stretch.num_steps // 2 + 1:  # soon after a look
                self._checkpoint(step, stretch.index)
            if step % self._plan.sample_every == 0:
                self._finish_checkpoints()  # else the copy that is being written counts
                look = torch.tensor([float(step), *figures()], dtype=torch.float64)
                self._found.samples[step // self._plan.sample_every - 1] = look
            if self._rank == 0 and step % _SAY_EVERY == 0:
                print(f"{self._plan.placement}: step {step} of {self._plan.steps}", flush=True)
        self._found.ends.append(step - stretch.start)

    def _evaluate(self) -> None:
        self.trainer.model.eval()
        with torch.no_grad():
            outcomes = list(self._outcomes(_EVALUATION))
        self._found.evaluations.append(
            (sum(error for error, _ in outcomes), float(sum(samples for _, samples in outcomes)))
        )

    def _outcomes(self, stretch: Stretch) -> Iterator[tuple[float, int]]:
        """Sum of squared errors and samples, step by step until the pipeline says the end."""
        feed = Feed(stretch, self._rank, self._world_size, is_padded=not self._is_ours)
        while True:
            try:
                predictions_B = self.pipeline.progress(feed)
            except StopIteration:
                return
            labels_B = feed.labels()
            if not self._is_ours and not len(labels_B):
                predictions_B = predictions_B[:0]
            assert predictions_B.shape == labels_B.shape, "an output is of another batch"
            yield float((predictions_B - labels_B).double().square().sum()), len(labels_B)

    def _forward(self, batch: Batch | None) -> tuple[Tensor, Tensor]:
        """Forward of stock TorchRec; a stand-in for no samples has a loss of zero."""
        assert batch is not None
        loss, predictions_B = self.trainer.model(batch)
        return (loss * 0 if counts_nothing(batch) else loss), predictions_B

    def _note_refresh(self) -> None:
        last = getattr(self.pipeline, "last_refresh", None)
        if last is self._seen or last is None:
            return
        self._seen = last
        self._found.counts["looks"] += 1
        self._found.counts["refreshes"] += last.num_moved > 0
        self._found.counts["moved_rows"] += last.num_moved

    def _checkpoint(self, step: int, index: int) -> None:
        """Writes one while batches are in flight, each second one beside training."""
        self._writers[1 - index % 2].finish()
        self._writers[index % 2].save(step, self.trainer.state)
        self._found.counts["async_checkpoints" if index % 2 else "checkpoints"] += 1
        if index % 3 == 1:
            self._writers[index % 2].finish()
            self._reload(step)

    def _reload(self, step: int) -> None:
        """Spoils all weights and optimizer state, then has them come back."""
        saved = join_state(self.trainer.state())
        with torch.no_grad():
            for value in local_tensors(self.trainer.state()):
                value.add_(1)
        path = self._folder / f"step_{step:08d}"
        load_checkpoint(path, self.trainer.state(), self.trainer.load_state)
        wrong = differences(join_state(self.trainer.state()), saved)
        self._found.reloads_unlike += [f"step {step}: {name}" for name in wrong]
        self._found.counts["reloads"] += 1

    def _finish_checkpoints(self) -> None:
        for writer in self._writers:
            writer.finish()

    def _why_unlike_homes(self) -> str:
        """Error of a replica that differs from its home; empty if none does."""
        try:
            for group in _groups_of(self.trainer.model):
                self._found.counts["replicas"] += group.num_hot_rows
                check_replicas(group)
        except PicassoError as error:
            return str(error)
        return ""


def _groups_of(model: nn.Module) -> Iterator[RowGroup]:
    """The hot/cold tables of a model, a group for each module."""
    for module in model.modules():
        if isinstance(module, HotColdModule):
            for sharding in module.table_shardings():
                if isinstance(sharding, HotColdEmbeddingSharding):
                    yield sharding.group


def _silent(line: str) -> None:
    """Says nothing."""
