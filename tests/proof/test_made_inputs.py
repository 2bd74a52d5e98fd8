"""Tables' input that the model makes: proved with any operators, if only tables get the result."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.proof import models
from torchrec_picasso.proof.proof import Proof, prove

Made = tuple[KeyedJaggedTensor, Any]
"""The input of the tables, and what else the loss is multiplied with."""
Make = Callable[[KeyedJaggedTensor], Made]


class _Model(models.Model):
    def __init__(self, make: Make) -> None:
        super().__init__(models.Head())
        self.make = make

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        features, factor = self.make(batch.sparse_features)
        loss, output = self.head(self.tables(features), batch)
        return loss * factor, output


class _Returning(_Model):
    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        features, beside = self.make(batch.sparse_features)
        loss, output = self.head(self.tables(features), batch)
        return loss, (output, beside)


def _prove(make: Make, *, is_told: bool = True, kind: type[_Model] = _Model) -> Proof:
    torch.manual_seed(0)
    model, batch = kind(make), models.make_batch()
    given = models.given_tables(model, batch.sparse_features)
    proof = prove(
        model, batch, given, made_inputs=partial(models.telling, given) if is_told else None
    )
    if proof.reason is None:
        models.assert_cut_is_whole(model, batch, given, [3, 2, 7], "mean")
    return proof


def _with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


def _merged(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    f, g = features["f"], features["g"]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["f", "g"],
        values=torch.cat([g.values(), f.values()]),
        lengths=torch.cat([g.lengths(), f.lengths()]),
    )


def _crossed(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    ids = features.values()
    return _with_ids(features, (ids * 2654435761 ^ ids.flip(0)) % 40)


def _by_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """An id for each sample: the mean number of its lookups, over the batch."""
    lengths = features.lengths()
    return KeyedJaggedTensor(features.keys(), lengths // lengths.sum(), lengths=lengths.clamp(1, 1))


PROVED: dict[str, Make] = {
    "merged": lambda features: (_merged(features), 1.0),
    "crossed": lambda features: (_crossed(features), 1.0),
    "largest": lambda f: (_with_ids(f, f.values() % f.values().max()), 1.0),
    "of lengths": lambda features: (_by_lengths(features), 1.0),
}


@pytest.mark.parametrize("name", PROVED)
def test_what_only_tables_get_may_be_made_in_any_way(name: str) -> None:
    assert _prove(PROVED[name]).reason is None


@pytest.mark.parametrize("name", PROVED)
def test_it_is_not_proved_where_tables_read_the_batch(name: str) -> None:
    assert __file__ in _prove(PROVED[name], is_told=False).reason


def _beside(made: KeyedJaggedTensor, factor: Any) -> Made:
    return made, factor


def _written(features: KeyedJaggedTensor) -> Made:
    made = _merged(features)
    made.values().clamp_(max=3)
    return made, 1.0


def _dead(features: KeyedJaggedTensor) -> Made:
    """A call that raises on parts with few lookups, of which nobody gets the result."""
    features.values()[torch.tensor([9])]
    return _merged(features), 1.0


def _per_lookup(features: KeyedJaggedTensor) -> Made:
    made = _merged(features)
    return made, 1.0 / made.values().shape[0]


def _largest_beside(features: KeyedJaggedTensor) -> Made:
    largest = features.values().max()
    return _with_ids(features, features.values() % largest), largest


REFUSED: dict[str, tuple[Make, str]] = {
    "the loss": (_largest_beside, "computes with a tensor that only tables may get"),
    "its size": (_per_lookup, "uses the batch's size as a number"),
    "fewer lookups than it takes": (
        lambda f: _beside(_with_ids(f, f.values() % f.values().topk(3).values[-1]), 1.0),
        "aten.topk at",
    ),
    "a write": (_written, "aten.clamp_ at"),
    "nobody": (_dead, "aten.index at"),
    "its parts": (
        lambda f: _beside(made := _merged(f), made.to_dict()["f"].values().float().mean()),
        "calls .item, which reads data",
    ),
    "a number": (lambda f: _beside(_merged(f), int(f.values().max())), "calls .__int__"),
    "noise": (
        lambda f: _beside(_with_ids(f, torch.randint_like(f.values(), 3)), 1.0),
        "draws random numbers",
    ),
    "dropout": (
        lambda f: _beside(_with_ids(f, functional.dropout(f.values().double()).long()), 1.0),
        "aten.native_dropout at",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_others_get_is_refused(name: str) -> None:
    make, reason = REFUSED[name]
    found = _prove(make).reason
    assert found is not None
    assert reason in found


def test_a_reason_names_the_first_operator_that_gets_it_and_the_first_that_made_it() -> None:
    found = _prove(lambda f: _beside(made := _crossed(f), made.values().float().mean())).reason
    assert found.startswith("aten._to_copy at ")
    assert "computes with a tensor that only tables may get, since aten.mul at " in found


def test_the_output_is_refused() -> None:
    found = _prove(_largest_beside, kind=_Returning).reason
    assert found == "output[1] is a tensor that only tables may get, so it cannot be joined"
