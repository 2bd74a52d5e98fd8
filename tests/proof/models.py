"""A small model over two tables, in which each test changes one thing.

Stand-ins for sharded tables give what collections give for a batch, without ranks. Whether a model
really gives in parts what it gives for the whole batch is computed with data.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.support.tables import Table, bags_of
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.split import children_of, split_batch
from torchrec_picasso.proof.guard import Guard
from torchrec_picasso.proof.proof import Given, Proof, prove

FEATURES = ("f", "g")
DIM, NUM_DENSE, HIDDEN = 8, 4, 8


class Head(nn.Module):
    """Layers over pooled rows, the mean of squared errors, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM * len(FEATURES) + NUM_DENSE, HIDDEN)
        self.over = nn.Linear(HIDDEN, 1)

    def features(self, pooled: KeyedTensor, batch: Batch) -> Tensor:
        return torch.cat([batch.dense_features, *(pooled[name] for name in FEATURES)], dim=1)

    def logits(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(self.hidden(x))).squeeze(1)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return ((logits - batch.labels) ** 2).mean()

    def output(self, logits: Tensor, batch: Batch) -> Any:
        return logits.detach()

    def forward(self, pooled: KeyedTensor, batch: Batch) -> tuple[Tensor, Any]:
        logits = self.logits(self.features(pooled, batch))
        return self.loss(logits, batch), self.output(logits, batch)


class Model(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        tables = [Table(f"t_{name}", DIM, 40, (name,)) for name in FEATURES]
        self.tables = bags_of(tables, "meta")
        self.head = head

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        return self.head(self.tables(batch.sparse_features), batch)


def with_loss(loss: Callable[[Head, Tensor, Batch], Tensor]) -> type[Head]:
    return type("WithLoss", (Head,), {"loss": loss})


def doing(act: Callable[[Any], Any]) -> Callable[[Any, Tensor, Batch], Tensor]:
    """The loss that is a mean over samples, and does something with the head beside."""

    def loss(head: Any, out: Tensor, batch: Batch) -> Tensor:
        act(head)
        return out.mean()

    return loss


def make_batch(num_samples: int = 12) -> Batch:
    """Some samples, with 0 to 3 lookups of each feature."""
    lengths = torch.randint(0, 4, (len(FEATURES) * num_samples,))
    return Batch(
        dense_features=torch.rand(num_samples, NUM_DENSE),
        sparse_features=KeyedJaggedTensor(
            keys=list(FEATURES), values=torch.randint(0, 40, (int(lengths.sum()),)), lengths=lengths
        ),
        labels=torch.rand(num_samples),
    )


def proved(head: nn.Module) -> tuple[Model, Guard, Batch]:
    """A model that is proved on a batch, and what guards its proof."""
    model, batch = Model(head), make_batch()
    proof = prove(model, batch, given_tables(model, batch.sparse_features))
    assert proof.reason is None
    assert proof.guard.changed(batch) is None
    return model, proof.guard, batch


def prove_head(head: nn.Module, losses: str = "mean") -> Proof:
    """Returns what comes of a head on some batch; no random number is drawn."""
    model, batch = Model(head), make_batch()
    given = given_tables(model, batch.sparse_features)
    state, numbers, drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    proof = prove(model, batch, given, losses)
    assert torch.equal(state, torch.get_rng_state())
    assert numbers == random.getstate()
    assert np.array_equal(drawn, np.random.get_state()[1])
    return proof


def given_tables(model: nn.Module, kjt: KeyedJaggedTensor) -> list[Given]:
    """Every collection of a model with an output for the batch; a call gives what was given."""
    return [
        Given(module=module, name=name, output=_output(module, kjt), give=_Give(module))
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
    ]


class _Give:
    take: Callable[[list[Tensor]], None] | None = None
    """Gets the tensors of each input."""

    def __init__(self, module: nn.Module) -> None:
        self._output: Any = None
        vars(module)["forward"] = partial(_OF, self)

    def __call__(self, output: Any) -> None:
        self._output = output


def _rows(ids: JaggedTensor, dim: int) -> JaggedTensor:
    values_ND = torch.rand(ids.values().numel(), dim).requires_grad_()
    return JaggedTensor(values=values_ND, lengths=ids.lengths())


def _output_of(given: _Give, features: Any) -> Any:
    if given.take is not None:
        given.take([features.values(), features.lengths()])
    return given._output


# the proof takes it for a library's function, as the forward that the pipeline sets is
_OF = FunctionType(_output_of.__code__, {"__name__": "torch"})


@contextmanager
def telling(given: Sequence[Given], take: Callable[[Any], None]) -> Iterator[None]:
    """In this context a function gets the tensors of each input of the tables."""
    for each in given:
        each.give.take = take  # type: ignore[attr-defined]
    yield


def _output(module: Any, kjt: KeyedJaggedTensor) -> Any:
    if isinstance(module, EmbeddingCollection):
        jagged = kjt.to_dict()
        configs = module.embedding_configs()
        dims = {name: item.embedding_dim for item in configs for name in item.feature_names}
        return {name: _rows(jagged[name], dim) for name, dim in dims.items()}
    pairs = [(f, c.embedding_dim) for c in module.embedding_bag_configs() for f in c.feature_names]
    names, dims = zip(*pairs)
    return KeyedTensor(
        list(names), list(dims), torch.rand(kjt.stride(), sum(dims)).requires_grad_()
    )


_RTOL, _ATOL = 1e-4, 1e-6
"""Float32 sums in another order, after a few layers."""


def assert_cut_is_whole(
    model: nn.Module, batch: Any, given: Sequence[Given], sizes_K: Sequence[int], losses: str
) -> None:
    """Compares loss, outputs and all gradients of a batch and of its parts."""
    whole = _run(model, batch, given, [sum(sizes_K)], losses)
    cut = _run(model, batch, given, sizes_K, losses)
    assert len(whole) == len(cut) > 2
    for one, other in zip(whole, cut):
        torch.testing.assert_close(other, one, rtol=_RTOL, atol=_ATOL)


def _run(
    model: nn.Module, batch: Any, given: Sequence[Given], sizes_K: Sequence[int], losses: str
) -> list[Tensor]:
    leaves = [*model.parameters(), *(leaf for item in given for leaf in _values(item.output))]
    leaves = [leaf for leaf in leaves if leaf.requires_grad and not leaf.is_meta]
    parts_K = split_batch(batch, sizes_K)
    outputs_K = [split_batch(item.output, sizes_K) for item in given]
    total, outputs = torch.zeros(()), []
    for index, size in enumerate(sizes_K):
        for item, parts in zip(given, outputs_K):
            item.give(parts[index])
        loss, output = model(parts_K[index])
        share = size / sum(sizes_K) if losses == "mean" else 1.0
        total = total + share * loss.sum(dim=0)
        outputs.append(output)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    joined = join_outputs(outputs, sizes_K)
    found = [total.detach(), *(grad for grad in grads if grad is not None)]
    return found + [leaf.detach() for leaf in tree_leaves(joined) if isinstance(leaf, Tensor)]


def _values(output: Any) -> list[Tensor]:
    if isinstance(output, KeyedTensor | JaggedTensor):
        return [output.values()]
    return [tensor for _, member in children_of(output) or () for tensor in _values(member)]
