"""Input that the model makes between batch and tables trains as under TorchRec, made ahead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from tests.train_pipeline.programs import (
    FEATURES,
    ROWS,
    Model,
    Program,
    assert_as_stock,
    cases_of,
)


class FromTensors(Model):
    """Features of one id each, built of a column of the batch, beside those of the batch."""

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        made = KeyedJaggedTensor.from_lengths_sync(
            keys=features.keys(),
            values=torch.cat([features.values() % 7, features.values()[:0]]),
            lengths=torch.cat([features.lengths()]),
        )
        return self.ebc(made)


class Merged(Model):
    """History and candidates, each a feature collection, concatenated."""

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        history, candidates = features["f"], features["g"]
        other = features["h"]
        made = KeyedJaggedTensor.from_lengths_sync(
            keys=list(FEATURES),
            values=torch.cat([candidates.values(), history.values(), other.values()]),
            lengths=torch.cat([candidates.lengths(), history.lengths(), other.lengths()]),
        )
        return self.ebc(made)


class Crossed(Model):
    def look_up(self, features: KeyedJaggedTensor) -> Any:
        ids = features.values()
        hashed = (ids * 2654435761 + torch.bitwise_xor(ids, ids >> 2)) % ROWS
        return self.ebc(KeyedJaggedTensor(features.keys(), hashed, lengths=features.lengths()))


class Shift(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        ids = (features.values() + 1) % ROWS
        return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


class Shifted(Model):
    def make(self) -> None:
        super().make()
        self.shift = Shift()

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(self.shift(features))


_IS = ["ebc: interleaved"]
PROGRAMS = {
    "from tensors": Program(model=FromTensors, told=_IS),
    "merged": Program(model=Merged, told=_IS),
    "crossed": Program(model=Crossed, told=_IS),
    "shifted": Program(model=Shifted, told=_IS),
    "shifted, postproc": Program(model=Shifted, told=_IS, options={"pipeline_postproc": True}),
}


@cases_of(PROGRAMS)
def test_trains_as_stock(name: str, num_micro_batches: int | None) -> None:
    assert_as_stock(__name__, name, num_micro_batches)
