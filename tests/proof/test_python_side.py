"""Effects of a model beside its operators: state, globals, clocks, hooks, outputs.

Each head does one thing that K forwards in a step do K times, or in another way. State and changes
that are hard to see follow; each attack has a twin that is proved."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.proof.models import (
    HIDDEN,
    NUM_DENSE,
    Head,
    Model,
    assert_cut_is_whole,
    doing,
    given_tables,
    make_batch,
    prove_head,
    proved,
    with_loss,
)
from torchrec_picasso.proof.proof import prove

NUM_CALLS = 0
CALLS: list[int] = []
NOTE_CALL = CALLS.append


def _tally() -> None:
    """Gets attributes."""


@functools.lru_cache
def _cached() -> int:
    return 1


def _make_closures() -> tuple[Callable[[], None], Callable[[], None]]:
    seen, num_calls = [], 0

    def note() -> None:
        seen.append(1)

    def count() -> None:
        nonlocal num_calls
        num_calls += 1

    return note, count


_NOTE, _COUNT = _make_closures()


class _Counter:
    def __init__(self) -> None:
        self.num_calls = 0

    def tick(self) -> int:
        self.num_calls += 1
        return 1

    def __call__(self, value: Tensor) -> Tensor:
        self.tick()
        return value


_TICK = _Counter().tick


class _Counts(nn.Module):
    num_calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.num_calls += 1
        return value


class _AddsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 1


class _ClassCount(Head):
    num_calls = 0
    seen: ClassVar[list[Tensor]] = []


def _global_counter(head: Head, out: Tensor, batch: Batch) -> Tensor:
    global NUM_CALLS
    NUM_CALLS += 1
    return out.mean()


def _function_attribute(head: Head, out: Tensor, batch: Batch) -> Tensor:
    function = _tally
    function.calls = 1
    return out.mean()


def _default(head: Head, out: Tensor, batch: Batch, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return out.mean()


def _local_import(head: Head, out: Tensor, batch: Batch) -> Tensor:
    import random as drawn

    return out.mean() * drawn.random()


def _counts_itself(head: Any, out: Tensor, batch: Batch) -> Tensor:
    head.num_calls = getattr(head, "num_calls", 0) + 1
    return out.mean() if head.num_calls < 40 else 2 * out.mean()


def _keeps(head: Any, out: Tensor, batch: Batch) -> Tensor:
    head.last = out
    return out.mean()


def _counts_class(head: Head, out: Tensor, batch: Batch) -> Tensor:
    type(head).num_calls += 1  # type: ignore[attr-defined]
    return out.mean()


def _notes_class(head: Any, out: Tensor, batch: Batch) -> Tensor:
    head.seen.append(out)
    return out.mean()


def _catches(head: Head, out: Tensor, batch: Batch) -> Tensor:
    try:
        return out.mean() if out[0] > 0 else 2 * out.mean()
    except Exception:
        return out.mean()


def _hooked(head: Head, out: Tensor, batch: Batch) -> Tensor:
    out.register_hook(lambda grad: grad.clamp(-1, 1))
    return out.mean()


def _saves_elsewhere(head: Head, out: Tensor, batch: Batch) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return (out**2).mean()


def _communicates(head: Head, out: Tensor, batch: Batch) -> Tensor:
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return out.mean()


def _calls_back(head: Head, out: Tensor, batch: Batch) -> Tensor:
    def distance(one: Tensor, other: Tensor) -> Tensor:
        CALLS.append(1)
        return (one - other).abs().sum(dim=1)

    rows = out[:, None]
    return nn.functional.triplet_margin_with_distance_loss(
        rows, 2 * rows, 3 * rows, distance_function=distance
    )


class _OfClass:
    num_calls = 0

    def tick(self) -> int:
        type(self).num_calls += 1
        return 1

    @classmethod
    def tick_all(cls) -> int:
        cls.num_calls += 1
        return 1


class _Forgets(_Counter):
    num_calls = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Itself(_Counter):
    def __deepcopy__(self, memo: Any) -> _Itself:
        return self


_KEPT_COUNTER = _Counter()


def _notes_on_weight(head: Any, out: Tensor, batch: Batch) -> Tensor:
    weight = head.over.weight
    weight.calls = getattr(weight, "calls", 0) + 1
    return out.mean()


def _adds_to_method(head: Any, out: Tensor, batch: Batch) -> Tensor:
    type(head).logits.calls = 1  # type: ignore[attr-defined]
    return out.mean()


def _writes_globals(head: Any, out: Tensor, batch: Batch) -> Tensor:
    type(head).logits.__globals__["NUM_CALLS"] += 1
    return out.mean()


_IN_LOSS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "global counter": (_global_counter, "writes the global NUM_CALLS"),
    "global list": (doing(lambda head: CALLS.append(1)), "writes CALLS"),
    "global method": (doing(lambda head: NOTE_CALL(1)), "writes NOTE_CALL"),
    "method of a global": (lambda head, out, batch: out.mean() * _TICK(), "writes _TICK.num_calls"),
    "closure list": (doing(lambda head: _NOTE()), "writes seen"),
    "closure counter": (doing(lambda head: _COUNT()), "variable num_calls"),
    "function attribute": (_function_attribute, "writes .calls of another object"),
    "attribute of a weight": (_notes_on_weight, "writes .calls of another object"),
    "attribute of a method": (_adds_to_method, "writes .calls of another object"),
    "globals of a method": (_writes_globals, "takes __globals__"),
    "asks of a size": (
        lambda head, out, batch: out.mean() if isinstance(out.shape[0], int) else 2 * out.mean(),
        "asks whether a value is an int",
    ),
    "class method": (
        lambda head, out, batch: out.mean() * _OfClass.tick_all(),
        "writes an attribute of a type",
    ),
    "mutable default": (_default, "a default of"),
    "cached function": (lambda head, out, batch: out.mean() * _cached(), "is a _lru_cache_wrapper"),
    "clock": (lambda head, out, batch: out.mean() * (time.time() % 2), "module time"),
    "random": (lambda head, out, batch: out.mean() * random.random(), "module random"),
    "NumPy": (lambda head, out, batch: out.mean() * np.random.rand(), "numpy.random"),
    "local import": (_local_import, "imports random"),
    "seeds": (doing(lambda head: torch.manual_seed(0)), "torch.random"),
    "attribute": (_counts_itself, "head.num_calls"),
    "kept output": (_keeps, "head.last"),
    "caught": (_catches, "over the batch"),
    "data": (lambda head, out, batch: out.mean() * out.detach().numpy().max(), "reads data"),
    "place in memory": (
        lambda head, out, batch: out.mean() * (1 + batch.labels.storage_offset()),
        "a part of another one",
    ),
    "view": (
        lambda head, out, batch: out.mean() * (1 if batch.labels._base is None else 2),
        "a part of another one",
    ),
    "gradient": (
        lambda head, out, batch: out.mean() * (1 if head.over.weight.grad is None else 2),
        ".grad",
    ),
    "double backward": (
        lambda head, out, batch: torch.autograd.grad(out.sum(), head.over.weight)[0].sum(),
        "runs a backward",
    ),
    "tensor hook": (_hooked, "register_hook"),
    "saved tensors": (_saves_elsewhere, "saved for backward"),
    "collective": (_communicates, "torch.distributed"),
    "called back": (_calls_back, "writes CALLS"),
    "own backward": (lambda head, out, batch: _AddsInBackward.apply(out).mean(), "_AddsInBackward"),
}


@pytest.mark.parametrize("name", _IN_LOSS)
def test_loss(name: str) -> None:
    loss, words = _IN_LOSS[name]
    reason = prove_head(with_loss(loss)()).reason
    assert words in str(reason)
    assert (NUM_CALLS, CALLS, vars(_tally), _default.__defaults__) == (0, [], {}, ([],))


def _with(name: str, value: Callable[[], Any], use: Callable[[Any, Tensor], Tensor]) -> type[Head]:
    def logits(head: Any, x: Tensor) -> Tensor:
        return use(head, Head.logits(head, x))

    def init(head: Any) -> None:
        Head.__init__(head)
        setattr(head, name, value())

    return type("With", (Head,), {"__init__": init, "logits": logits})


def _with_meter(meter: Callable[[], Any]) -> type[Head]:
    return _with("meter", meter, lambda head, out: out * head.meter.tick())


def _with_layer(layer: Callable[[], nn.Module]) -> type[Head]:
    def logits(head: Any, x: Tensor) -> Tensor:
        hidden = head.hidden(x)
        return head.over(hidden + head.layer(hidden)).squeeze(1)

    def init(head: Any) -> None:
        Head.__init__(head)
        head.layer = layer()

    return type("WithLayer", (Head,), {"__init__": init, "logits": logits})


class _Looks(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(10, HIDDEN, **options)

    def forward(self, value: Tensor) -> Tensor:
        return self.table((value[:, 0].sigmoid() * 9).long())


class _Follows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.fast = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        return self.fast(value) - self.slow(value)


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inside, self._use_reentrant = nn.Linear(HIDDEN, HIDDEN), use_reentrant

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inside, value, use_reentrant=self._use_reentrant)
        return found


class _AttendsOverBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2)

    def forward(self, value: Tensor) -> Tensor:
        steps = value[:, None]
        return self.attention(steps, steps, steps, need_weights=False)[0][:, 0]


def _hooked_linear() -> nn.Module:
    layer = nn.Linear(HIDDEN, HIDDEN)
    layer.register_forward_hook(lambda *given: None)
    return layer


def _clamped_linear() -> nn.Module:
    layer = nn.Linear(HIDDEN, HIDDEN)
    layer.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    return layer


_HEADS: dict[str, tuple[type[Head], str]] = {
    "counting object": (_with_meter(_Counter), "head.meter"),
    "counting callable": (_with("meter", _Counter, lambda head, out: head.meter(out)), "meter"),
    "class of an object": (_with_meter(_OfClass), "writes .num_calls of another object"),
    "object that forgets": (_with_meter(_Forgets), "head.meter.num_calls"),
    "object that is its copy": (_with_meter(_Itself), "head.meter.num_calls"),
    "weak reference": (
        _with(
            "meter", lambda: weakref.ref(_KEPT_COUNTER), lambda head, out: out * head.meter().tick()
        ),
        "head.meter.num_calls",
    ),
    "cached method": (
        _with("cached", lambda: _cached, lambda head, out: out * head.cached()),
        "head.cached is a _lru_cache_wrapper",
    ),
    "bound method": (
        _with("tick", lambda: _Counter().tick, lambda head, out: out * head.tick()),
        "head.tick",
    ),
    "cycle": (
        _with("turns", lambda: itertools.cycle((1, 2)), lambda head, out: out * next(head.turns)),
        "head.turns",
    ),
    "queue": (
        _with("kept", deque, lambda head, out: (head.kept.append(out.detach()), out)[1]),
        "head.kept",
    ),
    "own NumPy": (
        _with("drawn", np.random.default_rng, lambda head, out: out * head.drawn.random()),
        "head.drawn",
    ),
    "generator": (_with("drawn", torch.Generator, lambda head, out: out), "drawn is a Generator"),
    "lambda's default": (
        _with(
            "note",
            lambda: lambda x, seen=[]: (seen.append(1), x)[1],
            lambda head, out: head.note(out),
        ),
        "a default of",
    ),
    "unregistered": (
        _with("layers", lambda: [_Counts()], lambda head, out: head.layers[0](out)),
        "head.layers.num_calls",
    ),
    "registered": (_with("layer", _Counts, lambda head, out: head.layer(out)), "layer.num_calls"),
    "BatchNorm": (_with_layer(lambda: nn.BatchNorm1d(HIDDEN)), "num_batches_tracked"),
    "BatchNorm without a trace": (
        _with_layer(lambda: nn.BatchNorm1d(HIDDEN, track_running_stats=False)),
        "over the batch",
    ),
    "spectral norm": (
        _with_layer(lambda: spectral_norm(nn.Linear(HIDDEN, HIDDEN))),
        "parametrizations.weight.0._u",
    ),
    "teacher": (_with_layer(_Follows), "writes into head.layer.slow.weight"),
    "frequencies": (_with_layer(lambda: _Looks(scale_grad_by_freq=True)), "how often"),
    "renormed": (_with_layer(lambda: _Looks(max_norm=1.0)), "writes into head.layer.table.weight"),
    "attention over the batch": (_with_layer(_AttendsOverBatch), "attends over the batch"),
    "reentrant": (_with_layer(lambda: _Checkpointed(True)), "use_reentrant=False"),
    "forward hook": (_with_layer(_hooked_linear), "a forward hook on head.layer"),
    "parameter hook": (_with_layer(_clamped_linear), "a hook on the parameter head.layer.weight"),
    "script": (
        _with_layer(lambda: torch.jit.trace(nn.Linear(HIDDEN, HIDDEN), torch.rand(2, HIDDEN))),
        "compiled",
    ),
}


@pytest.mark.parametrize("name", _HEADS)
def test_head(name: str) -> None:
    head, words = _HEADS[name]
    assert words in str(prove_head(head()).reason)


@pytest.mark.parametrize(("loss", "name"), [(_counts_class, "num_calls"), (_notes_class, "seen")])
def test_a_class_is_left_as_it_was(loss: Callable[..., Tensor], name: str) -> None:
    head = type("Counting", (_ClassCount,), {"loss": loss, "num_calls": 0})
    assert name in str(prove_head(head()).reason)
    assert (head.num_calls, _ClassCount.num_calls, _ClassCount.seen) == (0, 0, [])


def test_an_object_of_a_class_is_left_as_it_was() -> None:
    meter = _Counter()
    head = _with("unused", int, lambda head, out: out * head.meter.tick())
    head.meter = meter  # type: ignore[attr-defined]
    assert "With.meter" in str(prove_head(head()).reason)
    assert vars(head)["meter"] is meter
    assert meter.num_calls == 0


def test_autocast_keeps_no_weight_without_data() -> None:
    head = Head()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prove_head(head).reason is None
        assert type(head.hidden(torch.rand(2, head.hidden.in_features))) is Tensor


def test_a_tensor_of_the_batch_has_no_attributes() -> None:
    model, batch = Model(Head()), make_batch()
    batch.labels.scale = 2.0  # type: ignore[attr-defined]
    reason = prove(model, batch, given_tables(model, batch.sparse_features)).reason
    assert "has .scale on a tensor" in str(reason)


@pytest.mark.parametrize(
    "dense",
    [torch.rand(12, 9)[:, 2:6], torch.rand(4, 12).t(), torch.rand(1, 4).expand(12, 4)],
    ids=["columns", "transposed", "expanded"],
)
def test_a_tensor_of_the_batch_that_is_not_contiguous(dense: Tensor) -> None:
    def loss(head: Head, out: Tensor, batch: Batch) -> Tensor:
        return out.mean() if batch.dense_features.is_contiguous() else (out**2).mean()

    model, batch = Model(with_loss(loss)()), make_batch()
    batch.dense_features = dense
    given = given_tables(model, batch.sparse_features)
    assert prove(model, batch, given).reason is None
    assert_cut_is_whole(model, batch, given, [3, 2, 7], "mean")


def test_lookups_that_are_not_contiguous() -> None:
    model, batch = Model(Head()), make_batch()
    features = batch.sparse_features
    ids = torch.stack([features.values()] * 2, 1)[:, 0]
    batch.sparse_features = KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())
    reason = prove(model, batch, given_tables(model, batch.sparse_features)).reason
    assert "not contiguous" in str(reason)


def _ids(batch: Batch, name: str = "f") -> Tensor:
    return batch.sparse_features[name].values()


_OUTPUTS: dict[str, tuple[Callable[[Head, Tensor, Batch], Any], str | None]] = {
    "entries": (lambda head, out, batch: {"over": out > 0, "labels": batch.labels, "n": 3}, None),
    "mean": (lambda head, out, batch: (out.detach(), out.mean().detach()), None),
    "lists": (lambda head, out, batch: batch.sparse_features.to_dict()["f"], None),
    "per lookup": (lambda head, out, batch: _ids(batch) * 2, None),
    "flipped lookups": (lambda head, out, batch: _ids(batch).flip(0), "over the batch"),
    "sorted lookups": (lambda head, out, batch: _ids(batch).sort()[0], "over the batch"),
    "lookups of two": (
        lambda head, out, batch: torch.cat([_ids(batch), _ids(batch, "g")]),
        "puts samples behind samples",
    ),
    "two a lookup": (
        lambda head, out, batch: torch.stack([_ids(batch)] * 2, 1).view(-1),
        "for each lookup of batch.sparse_features['f']",
    ),
    "sum": (lambda head, out, batch: out.sum(), "cannot be joined"),
    "several means": (lambda head, out, batch: out[:, None].mean(0), "cannot be joined"),
    "count": (lambda head, out, batch: out.mean().long(), "rounds a mean"),
    "ranks": (lambda head, out, batch: out.argsort().argsort(), "over the batch"),
    "over the median": (lambda head, out, batch: out > out.median(), "over the batch"),
    "flat": (lambda head, out, batch: torch.stack([out, out], 1).view(-1), "not one entry"),
    "turned": (lambda head, out, batch: torch.stack([out, out]), "not one entry"),
    "parameter": (lambda head, out, batch: head.over.weight, "a tensor of the model"),
    "view of a parameter": (lambda head, out, batch: head.over.bias[0], "a view into the model"),
    "size": (lambda head, out, batch: out.shape[0], "the size of the batch"),
    "all lookups": (lambda head, out, batch: batch.sparse_features, "KeyedJaggedTensor"),
}


@pytest.mark.parametrize("name", _OUTPUTS)
def test_output(name: str) -> None:
    output, words = _OUTPUTS[name]
    reason = prove_head(type("WithOutput", (Head,), {"output": output})()).reason
    assert reason is None if words is None else words in str(reason)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(NUM_DENSE, HIDDEN, batch_first=True)
        self.gated = nn.GRU(HIDDEN, HIDDEN)
        self.block = nn.TransformerEncoderLayer(HIDDEN, 2, 16, batch_first=True)
        self.inside = _Checkpointed(use_reentrant=False)
        self.looks = _Looks()

    def forward(self, value: Tensor) -> Tensor:
        steps = self.recurrent(value.view(value.shape[0], -1, NUM_DENSE))[0]
        steps = self.block(self.gated(steps.transpose(0, 1))[0].transpose(0, 1))
        return self.inside(steps.mean(dim=1)) + self.looks(value)


def test_layers_that_keep_samples_apart() -> None:
    assert prove_head(_with_layer(_Layers)()).reason is None


def test_what_is_made_in_the_forward_may_change() -> None:
    def loss(head: Head, out: Tensor, batch: Batch) -> Tensor:
        parts = [out]
        parts.append(2 * out)
        scale = 3
        return torch.stack([scale * part.mean() for part in parts if len(parts) > 1]).sum()

    assert prove_head(with_loss(loss)()).reason is None


NUM_TICKS = 0
COUNTS = {"calls": 0}


def _tick() -> int:
    global NUM_TICKS
    NUM_TICKS += 1
    return NUM_TICKS


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
        return sum(values) + freed + NUM_TICKS + COUNTS["calls"] + sum(later)


def _replaced(head: Any, out: Tensor, batch: Batch) -> Tensor:
    head.state = replace(head.state, step=head.state.step + 1)
    return out.mean() * head.state.step


def _from_tuple(head: Any, out: Tensor, batch: Batch) -> Tensor:
    return out.mean() * head.pair.tick() if isinstance(head.pair, _Pair) else out.mean()


def _from_number(head: Any, out: Tensor, batch: Batch) -> Tensor:
    return out.mean() * head.number.tick() if isinstance(head.number, _Number) else out.mean()


def _by_globals(head: Any, out: Tensor, batch: Batch) -> Tensor:
    getattr(_tick, "__globals__")["COUNTS"]["calls"] += 1  # noqa: B009
    return out.mean()


def _catches_number(head: Any, out: Tensor, batch: Batch) -> Tensor:
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
    "a hidden attribute of an enumeration": (lambda head: head.mode._hidden.append(1), "head.mode"),
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
    "an attribute of a tuple": (_from_tuple, "writes head.pair.num_calls"),
    "an attribute of a number": (_from_number, "writes head.number.num_calls"),
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
    "a refusal that is caught": (_catches_number, "a plain number"),
    "a write that is caught": (_catches_write, "writes .num_calls of another object"),
    "a refusal with a finally": (_at_last, "a plain number"),
    "an object that is called back": (_calls_object, "writes the global NUM_TICKS"),
    "none": (lambda head, out, batch: out.mean(), None),
}


@pytest.mark.parametrize("name", _STATES)
def test_hidden_state_is_seen_and_restored(name: str) -> None:
    loss, words = _STATES[name]
    head = type("Attack", (_Hidden,), {"loss": loss})()
    reason = prove_head(head).reason
    assert reason is None if words is None else words in str(reason)
    assert head.count() == 0


_ON_TABLES = {
    "a list": (lambda model: model.tables.seen.append(1), "writes tables.seen"),
    "an object": (lambda model: model.tables.counts.tick(), "writes tables.counts.num_calls"),
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
    model.tables.seen, model.tables.counts = [], _Counter()
    proof = prove(model, batch, given_tables(model, batch.sparse_features))
    assert proof.reason is None if words is None else words in str(proof.reason)
    assert (model.tables.seen, model.tables.counts.num_calls) == ([], 0)
    model.tables.seen.append(2)  # as a library may in a step
    assert proof.guard.changed(batch) is None


def _by_text(text: Callable[[Any], str]) -> type[Head]:
    return with_loss(lambda head, out, batch: out.mean() * {"64": 2.0}.get(text(out.shape[0]), 1.0))


@pytest.mark.parametrize("text", [str, repr, lambda size: f"{size}", lambda size: str((size,))])
def test_a_text_of_the_size_is_a_branch(text: Callable[[Any], str]) -> None:
    assert "a text of it" in str(prove_head(_by_text(text)()).reason)
    assert prove_head(_by_text(lambda size: "64")()).reason is None


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
