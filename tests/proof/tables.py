"""Stands in for sharded tables: what collections give for a batch, without ranks."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.proof.proof import Given


def given_tables(model: nn.Module, kjt: KeyedJaggedTensor) -> list[Given]:
    """Every collection of a model with an output for the batch; a call gives what was given."""
    return [
        Given(module=module, name=name, output=_output(module, kjt), give=_Give(module))
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
    ]


class _Give:
    def __init__(self, module: nn.Module) -> None:
        self._output: Any = None
        vars(module)["forward"] = partial(_OF, self)

    def __call__(self, output: Any) -> None:
        self._output = output


def _rows(ids: JaggedTensor, dim: int) -> JaggedTensor:
    values_ND = torch.rand(ids.values().numel(), dim).requires_grad_()
    return JaggedTensor(values=values_ND, lengths=ids.lengths())


def _of(given: _Give, features: Any) -> Any:
    return given._output


# the proof takes it for a library's function, as the forward that the pipeline sets is
_OF = FunctionType(_of.__code__, {"__name__": "torch"})


def _output(module: Any, kjt: KeyedJaggedTensor) -> Any:
    if isinstance(module, EmbeddingCollection):
        jagged = kjt.to_dict()
        configs = module.embedding_configs()
        dims = {name: of.embedding_dim for of in configs for name in of.feature_names}
        return {name: _rows(jagged[name], dim) for name, dim in dims.items()}
    pairs = [(f, c.embedding_dim) for c in module.embedding_bag_configs() for f in c.feature_names]
    names, dims = zip(*pairs)
    return KeyedTensor(
        list(names), list(dims), torch.rand(kjt.stride(), sum(dims)).requires_grad_()
    )
