"""State and changes that are hard to see; each attack has a twin that is proved."""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torchrec.datasets.utils import Batch

from tests.proof.models import (
    Head,
    Model,
    doing,
    given_tables,
    make_batch,
    prove_head,
    proved,
    with_loss,
)
from torchrec_picasso.proof.proof import prove

NUM_CALLS = 0
COUNTS = {"calls": 0}


def _tick() -> int:
    global NUM_CALLS
    NUM_CALLS += 1
    return NUM_CALLS


@dataclass
class _State:
    name: str = ""
    step: int = field(default=0, compare=False)


class _AlwaysEqual(dict):  # type: ignore[type-arg]
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _Ticks:
    num_calls = 0

    def tick(self) -> int:
        self.num_calls += 1
        return self.num_calls


_TICKS = _Ticks()


def _tick_object() -> None:
    _TICKS.num_calls += 1


class _HasSeen(Protocol):
    seen: list[int]


class _Notes(_HasSeen):
    """A class whose own class is one of the typing module's."""

    seen: list[int] = []  # noqa: RUF012


class _Pair(_Ticks, tuple):  # type: ignore[type-arg]
    """A tuple that counts."""


class _Number(_Ticks, float):
    """A number that counts."""


class _Names(frozenset):  # type: ignore[type-arg]
    def __init__(self, names: Any) -> None:
        self.seen: list[int] = []


class _Reference(weakref.ref):  # type: ignore[type-arg]
    """A reference with attributes."""


class _Log(logging.Logger):
    """A logger with attributes."""


class _Mode(Enum):
    """A choice whose value and attribute can be changed."""

    FAST = [0]  # noqa: RUF012

    def __init__(self, steps: list[int]) -> None:
        self.later: list[int] = []
        self._hidden: list[int] = []


def _noted() -> None:
    """Is never called; has a list."""


_noted.seen = []  # type: ignore[attr-defined]


class _Distance:
    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        _tick()
        return (one - other).abs().sum(dim=1)


class _Hidden(Head):
    """State where a comparison by ``==`` does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.equal, self.distance = _State(), _AlwaysEqual(n=0), _Distance()
        self.pair, self.number, self.freed = _Pair((1,)), _Number(1), [0]
        self.names, self.ordered, self.notes = _Names("ab"), OrderedDict(n=0), _Notes()
        self.reference, self.log = _Reference(_TICKS), _Log("log")
        vars(self.reference)["seen"], vars(self.log)["seen"] = [], []
        self.mode, self.noted, self.call = _Mode.FAST, _noted, partial(_tick)
        vars(self.call)["seen"] = []
        assert isinstance(self.pair, _Pair)
        assert isinstance(self.number, _Number)

    def count(self) -> int:
        freed: Any = sum(self.freed)
        values = (self.state.step, self.equal["n"], self.pair.num_calls, self.number.num_calls)
        later = [*vars(self.reference)["seen"], *vars(self.log)["seen"]]
        later += [*self.names.seen, *self.notes.seen, *self.ordered.values(), _TICKS.num_calls]
        later += [
            *self.mode.value,
            *self.mode.later,
            *self.mode._hidden,
            *vars(_noted)["seen"],
            *self.call.seen,
        ]
        return sum(values) + freed + NUM_CALLS + COUNTS["calls"] + sum(later)


def _replaced(head: Any, out: Tensor, batch: Batch) -> Tensor:
    head.state = replace(head.state, step=head.state.step + 1)
    return out.mean() * head.state.step


def _of_tuple(head: Any, out: Tensor, batch: Batch) -> Tensor:
    return out.mean() * head.pair.tick() if isinstance(head.pair, _Pair) else out.mean()


def _of_number(head: Any, out: Tensor, batch: Batch) -> Tensor:
    return out.mean() * head.number.tick() if isinstance(head.number, _Number) else out.mean()


def _by_globals(head: Any, out: Tensor, batch: Batch) -> Tensor:
    getattr(_tick, "__globals__")["COUNTS"]["calls"] += 1  # noqa: B009
    return out.mean()


def _catches(head: Any, out: Tensor, batch: Batch) -> Tensor:
    try:
        scale = int(out.shape[0])
    except Exception:
        scale = 1
    _tick()
    return out.mean() * scale


def _catches_write(head: Any, out: Tensor, batch: Batch) -> Tensor:
    try:
        _tick_object()
    except Exception:
        _tick()
    return out.mean()


def _at_last(head: Any, out: Tensor, batch: Batch) -> Tensor:
    try:
        return out.mean() * int(out.shape[0])
    finally:
        _tick()


def _calls_object(head: Any, out: Tensor, batch: Batch) -> Tensor:
    rows = out[:, None]
    return nn.functional.triplet_margin_with_distance_loss(
        rows, 2 * rows, 3 * rows, distance_function=head.distance
    )


_WRITES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a dictionary that equals all": (lambda head: head.equal.update(n=1), "head.equal.n"),
    "an attribute of a set": (lambda head: head.names.seen.append(1), "head.names"),
    "the value of an enumeration": (lambda head: head.mode.value.append(1), "head.mode"),
    "an attribute of an enumeration": (lambda head: head.mode.later.append(1), "head.mode"),
    "a class with a protocol": (lambda head: head.notes.seen.append(1), "the class _Notes.seen"),
    "a hidden attribute of an enumeration": (
        lambda head: head.mode._hidden.append(1),
        "head.mode",
    ),
    "an attribute of a function": (lambda head: head.noted.seen.append(1), "_noted.seen"),
    "an attribute of a reference": (
        lambda head: head.reference.seen.append(1),
        "head.reference.seen",
    ),
    "an attribute of a logger": (lambda head: head.log.seen.append(1), "head.log.seen"),
    "an attribute of a partial": (lambda head: head.call.seen.append(1), "head.call.seen"),
    "an ordered dictionary": (lambda head: head.ordered.update(m=1), "head.ordered"),
}
_STATES = {
    **{name: (doing(act), f"writes {what}") for name, (act, what) in _WRITES.items()},
    "a field that is not compared": (_replaced, "writes head.state"),
    "an attribute of a tuple": (_of_tuple, "writes head.pair.num_calls"),
    "an attribute of a number": (_of_number, "writes head.number.num_calls"),
    "a finalizer": (
        lambda head, out, batch: (weakref.finalize(out, head.freed.append, 1), out.mean())[1],
        "after the forward",
    ),
    "globals by getattr": (_by_globals, "attributes past its own"),
    "a dictionary of every module": (
        doing(lambda head: head._state_dict_hooks.update(n=1)),
        "takes _state_dict_hooks",
    ),
    "annotations": (doing(lambda head: head.__annotations__.update(n=1)), "takes __annotations__"),
    "a refusal that is caught": (_catches, "a plain number"),
    "a write that is caught": (_catches_write, "writes .num_calls of another object"),
    "a refusal with a finally": (_at_last, "a plain number"),
    "an object that is called back": (_calls_object, "writes the global NUM_CALLS"),
    "none": (lambda head, out, batch: out.mean(), None),
}


@pytest.mark.parametrize("name", _STATES)
def test_hidden_state_is_seen_and_restored(name: str) -> None:
    loss, words = _STATES[name]
    head = type("Attack", (_Hidden,), {"loss": loss})()
    reason = prove_head(head).reason
    assert reason is None if words is None else words in str(reason)
    assert head.count() == 0


class _Counts:
    def __init__(self) -> None:
        self.num = 0

    def add(self) -> None:
        self.num += 1


_ON_TABLES = {
    "a list": (lambda model: model.tables.seen.append(1), "writes tables.seen"),
    "an object": (lambda model: model.tables.counts.add(), "writes tables.counts.num"),
    "none": (lambda model: len(model.tables.seen), None),
}


@pytest.mark.parametrize("name", _ON_TABLES)
def test_state_on_a_module_that_does_not_run_is_seen(name: str) -> None:
    change, words = _ON_TABLES[name]

    class Counting(Model):
        def forward(self, batch: Batch) -> Any:
            change(self)
            return super().forward(batch)

    model, batch = Counting(Head()), make_batch()
    model.tables.seen, model.tables.counts = [], _Counts()
    proof = prove(model, batch, given_tables(model, batch.sparse_features))
    assert proof.reason is None if words is None else words in str(proof.reason)
    assert (model.tables.seen, model.tables.counts.num) == ([], 0)
    model.tables.seen.append(2)  # as a library may in a step
    assert proof.guard.changed(batch) is None


def _of_text(text: Callable[[Any], str]) -> type[Head]:
    return with_loss(lambda head, out, batch: out.mean() * {"64": 2.0}.get(text(out.shape[0]), 1.0))


@pytest.mark.parametrize("text", [str, repr, lambda size: f"{size}", lambda size: str((size,))])
def test_a_text_of_the_size_is_a_branch(text: Callable[[Any], str]) -> None:
    assert "a text of it" in str(prove_head(_of_text(text)()).reason)
    assert prove_head(_of_text(lambda size: "64")()).reason is None


def _takes(batch: dict[str, Any]) -> Batch:
    return batch.pop("inner")


def _counts(batch: dict[str, Any]) -> Batch:
    batch["step"] += 1
    return batch["inner"]


@pytest.mark.parametrize(
    ("read", "is_proved"), [(_takes, False), (_counts, False), (lambda b: b["inner"], True)]
)
def test_a_batch_that_the_model_changes_is_not_cut(
    read: Callable[[dict[str, Any]], Batch], is_proved: bool
) -> None:
    class Reading(Model):
        def forward(self, batch: Any) -> Any:
            return super().forward(read(batch))

    model, inner = Reading(Head()), make_batch()
    batch = {"inner": inner, "step": 0}
    reason = prove(model, batch, given_tables(model, inner.sparse_features)).reason
    assert reason is None if is_proved else "changes the containers" in str(reason)
    assert batch == {"inner": inner, "step": 0}


@pytest.mark.parametrize("is_shortened", [True, False])
def test_lengths_are_not_changed_by_a_view(is_shortened: bool) -> None:
    def loss(head: Head, out: Tensor, batch: Batch) -> Tensor:
        jagged = batch.sparse_features.to_dict()["f"]
        lengths = jagged.lengths().clone()
        if is_shortened:
            lengths.unsqueeze(1).clamp_(max=1)  # later offsets are not those of the values
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        values = jagged.values().float()[:, None]
        padded = torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [4], 0.0)
        return (out * padded.sum((1, 2))).mean()

    reason = prove_head(with_loss(loss)()).reason
    assert "a view of lengths" in str(reason) if is_shortened else reason is None


class _Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class _Sees(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _SEEN.append(func)
        return func(*args, **(kwargs or {}))


_SEEN: list[Any] = []


@contextmanager
def _packing() -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        _SEEN.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


_AROUND = {
    "cached weights": (parametrize.cached, "parametrize.cached"),
    "a mode": (_Sees, "the mode _Sees"),
    "hooks on saved tensors": (_packing, "saved for backward"),
    "nothing": (nullcontext, None),
}


@pytest.mark.parametrize("name", _AROUND)
def test_what_is_around_sees_no_tensors_without_data(name: str) -> None:
    around, words = _AROUND[name]
    model, batch = Model(Head()), make_batch()
    parametrize.register_parametrization(model.head.hidden, "weight", _Scale())
    given = given_tables(model, batch.sparse_features)
    proved = prove(model, batch, given)
    assert proved.reason is None
    assert proved.guard is not None
    _SEEN.clear()
    with around():
        reason = prove(model, batch, given).reason
        assert not parametrize._cache
        assert (proved.guard.changed(batch) is None) == (around in (nullcontext, _Sees))
    assert reason is None if words is None else words in str(reason)
    assert not any("Fake" in type(seen).__name__ for seen in _SEEN)


def test_a_replaced_forward_of_a_library_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _, guard, batch = proved(Head())
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: x - x.mean(0))
    assert "the forward of the class Linear" in str(guard.changed(batch))


def test_a_later_attribute_of_a_batch_is_seen() -> None:
    _, guard, batch = proved(Head())
    batch.labels.scale = 2.0  # type: ignore[attr-defined]
    assert "the batch" in str(guard.changed(batch))
