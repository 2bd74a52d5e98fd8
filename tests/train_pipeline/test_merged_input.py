"""Input that the model makes between batch and tables is made ahead, and trains as in stock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.support.placing import CPU
from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.train_pipeline import runs
from tests.train_pipeline.programs import (
    FEATURES,
    MAX_LENGTH,
    ROWS,
    SAMPLES,
    STEPS,
    Head,
    Model,
    Program,
    assert_as_stock,
    batch_of,
    build,
    cases_of,
    changed,
    dense_optimizer,
    gathered,
    sequences,
)
from torchrec_picasso import CompatError, InterleavedTrainPipeline
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.train_pipeline import made_ahead
from torchrec_picasso.train_pipeline.batch_watch import WRITES, BatchWatch
from torchrec_picasso.train_pipeline.equal_rows import are_uneven


def _with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


class Merged(Model):
    """History and candidates, concatenated."""

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        history, candidates, other = (features[name] for name in "fgh")
        merged = KeyedJaggedTensor.from_lengths_sync(
            keys=list(FEATURES),
            values=torch.cat([candidates.values(), history.values(), other.values()]),
            lengths=torch.cat([candidates.lengths(), history.lengths(), other.lengths()]),
        )
        return self.ebc(merged)


class Rolled(Model):
    """Sequences whose lengths are those of the neighbours, beside the batch's own lookups."""

    def make(self) -> None:
        super().make()
        self.rolled = sequences("s")

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        features = batch.sparse_features
        own = features["f"]
        made = KeyedJaggedTensor.from_lengths_sync(
            keys=["s"], values=self.ids(own), lengths=own.lengths().roll(1)
        )
        return self.head((self.ebc(features), self.rolled(made), own), batch)

    def ids(self, own: JaggedTensor) -> Tensor:
        return own.values()


class RolledLargest(Rolled):
    """Raises for a batch without samples, which a stock table gets."""

    def ids(self, own: JaggedTensor) -> Tensor:
        return own.values() % (own.values().max() + 1)


class SameTotals(Model):
    """Equally many lookups of two features, in other samples."""

    def make(self) -> None:
        super().make()
        self.beside = sequences("g")

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        features = batch.sparse_features
        beside = {"s": self.beside(features)["g"]}
        return self.head((self.ebc(features), beside, features["f"]), batch)


def _same_totals(rank: int, step: int) -> Batch:
    """On rank 1 parts have equally many too."""
    batch = batch_of(rank, step)
    lengths_f, _, lengths_h = batch.sparse_features.lengths().view(len(FEATURES), -1)
    lengths = torch.cat([lengths_f, lengths_f.roll(1 - rank), lengths_h])
    ids = batch.sparse_features.values().repeat(2)[: int(lengths.sum())]
    batch.sparse_features = KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)
    return batch


class OfLookups(Head):
    def forward(self, looked_up: Any, batch: Batch) -> tuple[Any, Any]:
        pooled, sequence, own = looked_up
        beside = torch.cat([sequence["s"].values(), own.values().unsqueeze(1) / ROWS], dim=1)
        padded = torch.ops.fbgemm.jagged_to_padded_dense(beside, [own.offsets()], [MAX_LENGTH])
        loss, output = super().forward(pooled, batch)
        return loss + padded.sum((1, 2)).square().mean(), output


class OfTensors(Merged):
    """One id per sample and feature, of a dense column."""

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        ids = (batch.dense_features * ROWS).long()[:, :3].T.flatten()
        made = KeyedJaggedTensor.from_lengths_sync(
            keys=list(FEATURES), values=ids, lengths=torch.ones_like(ids)
        )
        return self.head(self.ebc(made), batch)


class Crossed(Model):
    def look_up(self, features: KeyedJaggedTensor) -> Any:
        ids = features.values()
        crossed = torch.bitwise_xor(ids * 2654435761, ids.flip(0) >> 2)  # over the whole batch
        return self.ebc(_with_ids(features, crossed % ROWS))


class Largest(Model):
    """Raises for a batch without samples, such as the one that is read after the last."""

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        ids = features.values()
        return self.ebc(_with_ids(features, ids % (ids.max() - 3)))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.tensor(3))

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        by = 1 if self.training else self.by
        return _with_ids(features, (features.values() + by) % ROWS)


class Shifted(Model):
    def make(self) -> None:
        super().make()
        self.shift = Shift()

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(self.shift(features))


class ByMode(Model):
    """Ids of a table's first rows in training, as they are in evaluation."""

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(_with_ids(features, features.values() % 7) if self.training else features)


class Noisy(Model):
    def look_up(self, features: KeyedJaggedTensor) -> Any:
        noise = torch.randint_like(features.values(), 1)
        return self.ebc(_with_ids(features, features.values() + noise))


class Dropped(Model):
    def look_up(self, features: KeyedJaggedTensor) -> Any:
        zeros = functional.dropout(features.values().float() * 0, training=self.training)
        return self.ebc(_with_ids(features, features.values() + zeros.long()))


class Learned(Model):
    def make(self) -> None:
        super().make()
        self.by = nn.Parameter(torch.tensor(1.0), requires_grad=False)

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(_with_ids(features, (features.values() + self.by.long()) % ROWS))


class Counting(Model):
    step = 0

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        self.step += 1
        return self.ebc(_with_ids(features, (features.values() + ROWS * self.step) % ROWS))


class CountingShift(nn.Module):
    step = 0

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        self.step += 1
        return _with_ids(features, (features.values() + ROWS * self.step) % ROWS)


class CountedShift(Shifted):
    def make(self) -> None:
        super().make()
        self.shift = CountingShift()


class Buffered(Model):
    def make(self) -> None:
        super().make()
        self.register_buffer("by", torch.tensor(ROWS))

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(_with_ids(features, (features.values() + self.by) % ROWS))


class Written(Model):
    def make(self) -> None:
        super().make()
        # stock's tracing writes it once more
        self.register_buffer("by", torch.tensor(ROWS), persistent=False)

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        self.by.add_(ROWS)
        return self.ebc(_with_ids(features, (features.values() + self.by) % ROWS))


class Chance(Model):
    """A random number of no batch, which changes nothing."""

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        by = int(random.random() < 0)
        return self.ebc(_with_ids(features, (features.values() + by) % ROWS))


class Clamp(nn.Module):
    def forward(self, ids: Tensor) -> None:
        ids.clamp_(max=5)


class Clamped(Model):
    """A layer writes into what the model has made for the table."""

    def make(self) -> None:
        super().make()
        self.clamp = Clamp()

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        ids = features.values() * 1
        self.clamp(ids)
        return self.ebc(_with_ids(features, ids))


class Increment(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        features.values().add_(1).remainder_(ROWS)
        return _with_ids(features, features.values())


class Incremented(Shifted):
    """A layer writes into the batch, each time something else."""

    def make(self) -> None:
        super().make()
        self.shift = Increment()


class LateHalving(nn.Module):
    """Writes into some batches, of which the first is none; the table's input stays the same."""

    def is_due(self, batch: Batch) -> bool:
        return int(batch.sparse_features.values()[0]) > 10

    def write(self, batch: Batch) -> None:
        batch.labels.div_(2)

    def forward(self, batch: Batch) -> KeyedJaggedTensor:
        if self.is_due(batch):
            self.write(batch)
        return _with_ids(batch.sparse_features, batch.sparse_features.values() * 1)


class PartHalving(LateHalving):
    """Writes into micro-batches, and not into the whole batch."""

    def is_due(self, batch: Batch) -> bool:
        return batch.labels.size(0) < SAMPLES


class ArrayHalving(LateHalving):
    """Writes without another version."""

    def write(self, batch: Batch) -> None:
        np.divide(batch.labels.numpy(), 2, out=batch.labels.numpy())


class ReplacingHalving(LateHalving):
    def write(self, batch: Batch) -> None:
        batch.labels = batch.labels / 2


class EvaluationHalving(ArrayHalving):
    """Would write into the first batch, which is trained."""

    def is_due(self, batch: Batch) -> bool:
        return not self.training


class Noting(LateHalving):
    """Keeps a result in the batch, which is no write."""

    def is_due(self, batch: Batch) -> bool:
        return True

    def write(self, batch: Batch) -> None:
        batch.halves = batch.labels / 2


def _halved(layer: type[LateHalving]) -> Callable[[type[Head]], Model]:
    class Halved(Model):
        def make(self) -> None:
            super().make()
            self.layer = layer()

        def forward(self, batch: Batch) -> tuple[Any, Any]:
            return self.head(self.ebc(self.layer(batch)), batch)

    return Halved


class ByArray(Model):
    """State that no guard of a proof sees."""

    def make(self) -> None:
        super().make()
        self.by = np.zeros(1, dtype=np.int64)

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(_with_ids(features, (features.values() + int(self.by[0])) % ROWS))


class Compiled(Shifted):
    """A compiled layer makes the ids, another one runs before the tables."""

    def make(self) -> None:
        super().make()
        self.shift = torch.compile(Shift(), backend="eager")
        self.before = torch.compile(nn.Linear(4, 4), backend="eager")

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        dense = self.before(batch.dense_features)
        pooled = self.look_up(batch.sparse_features)
        return self.head(pooled, Batch(dense, batch.sparse_features, batch.labels))


class Cast(OfTensors):
    def forward(self, batch: Batch) -> tuple[Any, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            dense = batch.dense_features @ torch.eye(4)
        return super().forward(Batch(dense.float() * 0.9, batch.sparse_features, batch.labels))


class InPlace(Model):
    def look_up(self, features: KeyedJaggedTensor) -> Any:
        ids = features.values() * 1
        ids.clamp_(max=5)
        return self.ebc(_with_ids(features, ids % ROWS))


class Salted(Model):
    salt = 0

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(_with_ids(features, (features.values() + self.salt) % ROWS))


def _salt(model: Any, step: int) -> None:
    model.module.salt = step // 3


def _write(model: Any, step: int) -> None:
    if step == 3:
        model.module.by.fill(1) if isinstance(
            model.module.by, np.ndarray
        ) else model.module.by.fill_(1)


def _write_data(model: Any, step: int) -> None:
    model.module.by.data.fill_(step // 3)


def _hook(model: Any) -> None:
    model.module.shift.register_forward_hook(lambda module, args, output: None)


IS = ["ebc: interleaved"]
_HERE = f"made inside the model: {__file__}:"
NUMBERS = (None, 1, 2, 4)


def _half_empty(rank: int, step: int) -> Batch:
    """No lookups in the first half of some batches of one rank, of which nothing is the largest."""
    batch = batch_of(rank, step)
    if rank and step % 2:
        lengths = batch.sparse_features.lengths().view(len(FEATURES), -1).clone()
        lengths[:, : SAMPLES // 2] = 0
        ids = batch.sparse_features.values()[: int(lengths.sum())]
        batch.sparse_features = KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths.flatten())
    return batch


def _refused(model: Callable[[type[Head]], Model], what: str) -> Program:
    return Program(model=model, in_summary=["ebc: not pipelined", _HERE, what], numbers=(1,))


def _stale(model: type[Model], **around: Any) -> Program:
    what = "gives ebc another input than ahead of the model: the model's forward reads state"
    return Program(model=model, numbers=(1, 2), refused=(1, 2), refusal=what, **around)


def _writing(layer: type[LateHalving], refused: tuple[int, ...] = (1, 2)) -> Program:
    return Program(model=_halved(layer), numbers=(1, 2), refused=refused, refusal=WRITES)


def _candidates(head: Head, batch: Batch) -> JaggedTensor:
    """A value per lookup of a feature."""
    candidates = batch.sparse_features["g"]
    values = candidates.values() * head.over.weight[0, 0]
    return JaggedTensor(values=values.detach(), lengths=candidates.lengths())


def _reordered(change: Callable[[Tensor], Tensor]) -> Program:
    """Gives an output per candidate, in another order than theirs."""
    head = changed(output=lambda head, _, batch: change(_candidates(head, batch).values()))
    what = "expected samples in dim 0"
    whole = [*IS, "batches are whole: "]
    return Program(model=Merged, head=head, in_summary=whole, refusal=what)


PROGRAMS = {
    "merged": Program(model=Merged, in_summary=IS, numbers=NUMBERS),
    "of tensors": Program(model=OfTensors, in_summary=IS, numbers=NUMBERS),
    "crossed": Program(model=Crossed, in_summary=IS, numbers=NUMBERS),
    "largest": Program(model=Largest, in_summary=IS, numbers=NUMBERS),
    "largest of none": Program(model=Largest, in_summary=IS, numbers=NUMBERS, batch=_half_empty),
    "shifted": Program(model=Shifted, in_summary=IS, numbers=NUMBERS),
    "rolled": Program(model=Rolled, head=OfLookups, in_summary=IS, numbers=NUMBERS),
    "rolled, largest": Program(model=RolledLargest, head=OfLookups, in_summary=IS, numbers=NUMBERS),
    "same totals": Program(
        model=SameTotals, head=OfLookups, batch=_same_totals, in_summary=IS, numbers=NUMBERS
    ),
    "postproc": Program(
        model=Shifted, in_summary=IS, numbers=NUMBERS, options={"pipeline_postproc": True}
    ),
    "compiled": Program(model=Compiled, in_summary=IS, numbers=(1, None)),
    "cast": _refused(Cast, "is in a mode of its own, such as autocast (in training)"),
    "stock tables": Program(
        model=Merged,
        in_summary=[*IS, "ebc (stock tables): computed once"],
        stock=["t_g"],
        numbers=NUMBERS,
    ),
    "outputs flipped": _reordered(lambda outputs_N: outputs_N.flip(0)),
    "outputs sorted": _reordered(lambda outputs_N: outputs_N.sort()[0]),
    "buffer": Program(model=Buffered, in_summary=IS, numbers=NUMBERS),
    "noise": _refused(Noisy, "draws random numbers"),
    "dropout": _refused(Dropped, "draws random numbers (in training)"),
    "parameter": _refused(Learned, "reads a parameter"),
    "chance": _refused(Chance, "comes after random numbers (in training)"),
    "hook": dataclasses.replace(
        _refused(Shifted, "follows a module with a hook on its forward"), prepare=_hook
    ),
    "counter": _refused(Counting, "gives what the forward changes"),
    "module's counter": _refused(CountedShift, "changes an attribute"),
    "written buffer": _refused(Written, "gives what the forward changes"),
    "in place": _refused(InPlace, "writes in place"),
    "batch written by a layer": _refused(Incremented, "writes in place"),
    "batch written later": _writing(LateHalving),
    "array written later": _writing(ArrayHalving),
    "member replaced later": _writing(ReplacingHalving),
    "micro-batches written": _writing(PartHalving, refused=(2,)),
    "array written in evaluation": _refused(_halved(EvaluationHalving), WRITES),
    "note in the batch": Program(model=_halved(Noting), in_summary=IS, numbers=(1, 2)),
    "written by a layer": dataclasses.replace(_stale(Clamped), refusal="a layer has written"),
    "attribute changed between steps": _stale(Salted, before_step=_salt),
    "buffer written between steps": _stale(Buffered, before_step=_write),
    "buffer's data written between steps": _stale(Buffered, before_step=_write_data),
    "array written between steps": _stale(ByArray, before_step=_write),
}


@cases_of(PROGRAMS)
def test_trains_as_stock(name: str, num_micro_batches: int | None) -> None:
    assert_as_stock(__name__, name, num_micro_batches)


class Beside(Merged):
    """The loss gets what the table gets."""

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        loss, output = super().forward(batch)
        return loss * (1 + batch.sparse_features.values().max()), output


CUT = (Merged, OfTensors, Crossed, Largest, Shifted, ByMode, Buffered)


def _summaries(rank: int, world_size: int) -> dict[type[Model], str]:
    summaries = {}
    for kind in (*CUT, Beside):
        model = build(kind(Head), ())
        pipeline = InterleavedTrainPipeline(model, dense_optimizer(model), CPU)
        runs.run_to_the_end(pipeline, iter([batch_of(rank, step) for step in range(STEPS)]))
        summaries[kind] = pipeline.summary()
    return summaries


def test_batches_are_cut_by_default_if_only_tables_get_what_is_made() -> None:
    for summaries in run_once(_summaries, 2):
        assert not [kind for kind in CUT if "batches are whole" in summaries[kind]]
        assert "batches are whole: " in summaries[Beside]
        assert "max at " + __file__ in summaries[Beside]


def _watched(rank: int, world_size: int) -> list[list[str]]:
    """Names of the functions that each watch is told of."""
    watched: list[list[str]] = []

    class Noting(BatchWatch):
        def __init__(self, batch: Any) -> None:
            super().__init__(batch)
            watched.append([])

        def note(self, function: Any) -> None:
            is_property = function.__name__ == "__get__"
            watched[-1].append((function.__self__ if is_property else function).__name__)
            super().note(function)

    model = build(Merged(Head), ())
    pipeline = InterleavedTrainPipeline(model, dense_optimizer(model), CPU, num_micro_batches=4)
    with mock.patch.object(made_ahead, "BatchWatch", Noting):
        runs.run_to_the_end(pipeline, iter([batch_of(rank, step) for step in range(STEPS)]))
    return watched


def test_a_slice_runs_once_per_batch_and_micro_batch_and_nothing_else_is_recorded() -> None:
    for watched in run_once(_watched, 2):
        assert len(watched) == STEPS * (1 + 4) + 1  # an empty batch is read after the last
        assert {names.count("cat") for names in watched} == {2}
        assert not any("_version" in names for names in watched)


def _per_candidate(self: Head, out: Tensor, batch: Batch) -> Any:
    """With lengths, and without."""
    candidates = _candidates(self, batch)
    return candidates, torch.stack([candidates.values().sin(), candidates.values()], dim=1)


def _weighted(self: Head, out: Tensor, batch: Batch) -> Any:
    losses = ((out - batch.labels) ** 2 * batch.labels).sum()
    pair = losses, batch.labels.sum()
    return pair if self.is_ours else losses / pair[1]


CANDIDATES = changed(output=_per_candidate, loss=_weighted)
NUMBERS_OF_LIVES = (1, 2, 4, None)
LIVES = [(model, k) for model in (Merged, ByMode, Shifted) for k in NUMBERS_OF_LIVES]
NUM_STEPS = 10


def _live(rank: int, world_size: int) -> dict[Any, Any]:
    return {
        (model, k): _life(model, rank, k)
        for model in (Merged, ByMode, Shifted)
        for k in (0, *NUMBERS_OF_LIVES)
    }


def _life(kind: type[Model], rank: int, num_micro_batches: int | None) -> Any:
    """Outputs and tables of training and evaluation in turn; 0 micro-batches = stock."""
    is_ours = num_micro_batches != 0
    model = kind(CANDIDATES)
    model.head.is_ours = is_ours
    sharded = build(model, () if is_ours else None)
    optimizer = dense_optimizer(sharded)
    batches = [batch_of(rank, s, SAMPLES - 51 * rank * (s == 9)) for s in range(NUM_STEPS)]
    outputs, iterator, pipeline = [], iter(batches), None
    if is_ours:
        pipeline = InterleavedTrainPipeline(
            *(sharded, optimizer, CPU),
            num_micro_batches=num_micro_batches,
            loss_reduction="ratio",
        )
    for step, batch in enumerate(batches):
        sharded.train(step not in (4, 5, 8))
        if pipeline is not None and step == 6:  # batches in flight stay
            pipeline.detach()
            pipeline.attach()
        is_cast = step in (2, 3, 5)
        with torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext():
            if pipeline is not None:
                output = pipeline.progress(iterator)
            else:
                output = _plain_step(sharded, optimizer, batch)
        outputs.append((output[0].values(), output[0].lengths(), output[1]))
    assert pipeline is None or pipeline.summary().startswith("ebc: interleaved")
    assert pipeline is None or "whole" not in pipeline.summary()
    return outputs, gathered(sharded)


def _plain_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> Any:
    if not model.training:
        with torch.no_grad():
            return model(batch)[1]
    model.fused_optimizer.zero_grad()
    optimizer.zero_grad()
    loss, output = model(batch)
    loss.backward()
    optimizer.step()
    return output


@pytest.mark.parametrize(("model", "num_micro_batches"), LIVES)
def test_training_and_evaluation_in_turn(model: type[Model], num_micro_batches: int | None) -> None:
    """Outputs per candidate are joined, by their lengths or by a proof; autocast and sizes of
    batches change, and the model is detached and attached again."""
    for results in run_once(_live, 2):
        found, expected = results[model, num_micro_batches], results[model, 0]
        tolerance = {"rtol": 2.0**-6, "atol": 2.0**-8}  # of bfloat16 in some steps
        torch.testing.assert_close(found, expected, **tolerance)


@torch.fx.wrap
def _checked(ids: Tensor) -> Tensor:
    if ids.numel() and int(ids.max()) >= ROWS:
        raise ValueError("no such row")
    return ids


class Checked(Model):
    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(_with_ids(features, _checked(features.values())))


class CheckedBeside(Rolled):
    """The stock table's input is the one that is checked."""

    def ids(self, own: JaggedTensor) -> Tensor:
        return _checked(own.values())


class ByRank(Model):
    def look_up(self, features: KeyedJaggedTensor) -> Any:
        ids = features.values() % ROWS
        return self.ebc(_with_ids(features, ids) if dist.get_rank() else features)


def _refusals(rank: int, world_size: int) -> dict[type[Model], str]:
    """Rank 1 has a bad batch after three good ones, or another forward."""
    batches = [batch_of(rank, step) for step in range(STEPS)]
    if rank == 1:
        batches[3].sparse_features.values()[0] = ROWS
    messages = {}
    for kind in (Checked, CheckedBeside, ByRank):
        model = build(kind(OfLookups if kind is CheckedBeside else Head), ())
        pipeline = InterleavedTrainPipeline(model, dense_optimizer(model), CPU)
        messages[kind] = refusal(CompatError, runs.run_to_the_end, pipeline, iter(batches))
    return messages


def test_what_one_rank_cannot_run_ahead_is_refused_on_all() -> None:
    messages, others = run_once(_refusals, 2)
    assert messages == others
    for kind in (Checked, CheckedBeside):
        assert messages[kind].startswith(f"rank 1: {__file__}:")
        assert "raises ValueError: no such row" in messages[kind]
    assert (
        "the model's forward differs by rank: on rank 0 it reads the input of" in messages[ByRank]
    )


def test_a_feature_of_several_tables_is_counted_once() -> None:
    lengths = torch.tensor([1, 1, 2, 0])
    batch = KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=lengths)
    parts: Any = SimpleNamespace(
        filled=[0, 1], sizes_K=[1, 1], micro_batches_K=split_batch(batch, [1, 1])
    )
    assert not are_uneven([["ec['f@a']", "ec['f@b']", "batch['f']"]], parts, {"ec": batch})
    assert are_uneven([["ec['f@a']", "ec['g@b']"]], parts, {"ec": batch})
