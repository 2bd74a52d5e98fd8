"""Whether a model really gives in parts what it gives for the whole batch, computed with data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.split import children_of, split_batch
from torchrec_picasso.proof.proof import Given, Losses

_RTOL, _ATOL = 1e-4, 1e-6
"""Float32 sums in another order, after a few layers."""


def assert_cut_is_whole(
    model: nn.Module, batch: Any, given: Sequence[Given], sizes_K: Sequence[int], losses: Losses
) -> None:
    """Compares loss, outputs and all gradients of a batch and of its parts."""
    whole = _run(model, batch, given, [sum(sizes_K)], losses)
    cut = _run(model, batch, given, sizes_K, losses)
    assert len(whole) == len(cut) > 2
    for one, other in zip(whole, cut):
        torch.testing.assert_close(other, one, rtol=_RTOL, atol=_ATOL)


def _run(
    model: nn.Module, batch: Any, given: Sequence[Given], sizes_K: Sequence[int], losses: Losses
) -> list[Tensor]:
    leaves = [*model.parameters(), *(leaf for of in given for leaf in _values(of.output))]
    leaves = [leaf for leaf in leaves if leaf.requires_grad and not leaf.is_meta]
    parts_K = split_batch(batch, sizes_K)
    outputs_K = [split_batch(of.output, sizes_K) for of in given]
    total, outputs = torch.zeros(()), []
    for index, size in enumerate(sizes_K):
        for of, parts in zip(given, outputs_K):
            of.give(parts[index])
        loss, output = model(parts_K[index])
        share = size / sum(sizes_K) if losses is Losses.MEANS else 1.0
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
