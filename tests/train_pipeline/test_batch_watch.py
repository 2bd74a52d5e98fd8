"""Writes into a batch are found, whatever they are made by."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from torchrec_picasso.train_pipeline.batch_watch import BatchWatch


class _Noting(TorchFunctionMode):
    def __init__(self, watch: BatchWatch) -> None:
        super().__init__()
        self.watch = watch
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        self.watch.note(func)
        return func(*args, **(kwargs or {}))


def _batch() -> Any:
    """An object of a type of its own, with all that a batch may hold."""
    ids, weights = torch.arange(4), torch.tensor([1.0, float("nan"), 2.0, 3.0])
    features = KeyedJaggedTensor(["f", "g"], ids, weights, torch.ones(4, dtype=torch.int64))
    batch = Batch(torch.ones(2, 3), features, torch.ones(2))
    beside = {"graph": torch.eye(2).to_sparse(), "array": np.array([1.0, np.nan])}
    return SimpleNamespace(inside={"x": torch.ones(2)}, batch=batch, flag=None, step=1, **beside)


def _set(batch: Any, name: str, value: Any) -> None:
    setattr(batch, name, value)


def _storage(batch: Any) -> None:
    memory = batch.inside["x"].untyped_storage()
    torch.empty(0).set_(memory, 0, (2,)).mul_(2)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda b: b.batch.labels.div_(2),
    "into a view": lambda b: b.batch.dense_features[:, 1].zero_(),
    "into ids": lambda b: b.batch.sparse_features.values().add_(1),
    "its data": lambda b: b.batch.sparse_features.weights().data.zero_(),
    "other data": lambda b: _set(b.inside["x"], "data", torch.zeros(2)),
    "an array": lambda b: b.batch.labels.numpy().fill(2),
    "an array in the batch": lambda b: b.array.fill(2),
    "by a function": lambda b: b.batch.labels.apply_(lambda label: label + 1),
    "a sparse tensor": lambda b: _set(b, "graph", b.graph * 2),
    "another library's tensor": lambda b: torch.from_dlpack(b.inside["x"]).mul_(2),
    "its memory": _storage,
    "several at once": lambda b: torch._foreach_mul_([b.batch.labels, b.inside["x"]], 2),
    "an attribute": lambda b: _set(b.batch, "labels", b.batch.labels / 2),
    "an item": lambda b: b.inside.update(x=torch.zeros(2)),
    "a number": lambda b: _set(b, "step", b.step + 1),
    "weights": lambda b: _set(b.batch.sparse_features, "_weights", torch.ones(4)),
    "less": lambda b: b.inside.clear(),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_write_is_found(what: str) -> None:
    batch = _batch()
    watch = BatchWatch(batch)
    with _Noting(watch):
        WRITES[what](batch)
    assert watch.is_written() or watch.is_replaced()


def test_looking_for_writes_calls_no_operator() -> None:
    """Operators of the time in which the model's are recorded would be recorded, too."""
    watch = BatchWatch(_batch())
    with _Noting(watch) as noting:
        assert not watch.is_written()
    assert noting.names == {"__get__"}  # of versions


READS: dict[str, Callable[[Any], Any]] = {
    "an array": lambda b: b.batch.sparse_features.weights().numpy().sum(),
    "offsets": lambda b: b.batch.sparse_features.to_dict(),
    "the same": lambda b: _set(b.batch, "labels", b.batch.labels * 1),
    "a note": lambda b: _set(b.batch, "halves", b.batch.labels / 2),
    "a place for notes": lambda b: _set(b, "flag", torch.ones(1)),
}


@pytest.mark.parametrize("what", READS)
def test_what_changes_nothing_is_no_write(what: str) -> None:
    batch = _batch()
    watch = BatchWatch(batch)
    with _Noting(watch):
        READS[what](batch)
    assert not watch.is_written()
    assert not watch.is_replaced()
