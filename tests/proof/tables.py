"""Stands in for sharded tables: what collections give for a batch, without ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.proof.proof import Given

__all__ = ["given_tables"]


def given_tables(model: nn.Module, kjt: KeyedJaggedTensor) -> list[Given]:
    """Every collection of a model with an output for the batch; a call gives what was given."""
    return [
        Given(module=module, name=name, output=_output(module, kjt), give=_Give(module))
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
    ]


class _Give:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, output: Any) -> None:
        vars(self._module)["forward"] = partial(_first, output)


def _first(output: Any, features: Any) -> Any:
    return output


def _output(module: Any, kjt: KeyedJaggedTensor) -> Any:
    if isinstance(module, EmbeddingCollection):
        jagged = kjt.to_dict()
        return {
            name: JaggedTensor(
                values=torch.rand(jagged[name].values().numel(), config.embedding_dim).requires_grad_(),
                lengths=jagged[name].lengths(),
            )
            for config in module.embedding_configs()
            for name in config.feature_names
        }
    pairs = [(f, c.embedding_dim) for c in module.embedding_bag_configs() for f in c.feature_names]
    names, dims = zip(*pairs)
    return KeyedTensor(
        list(names), list(dims), torch.rand(kjt.stride(), sum(dims)).requires_grad_()
    )
