"""Calls of PyTorch to draw from: of one tensor, of two, and those that write."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Call = Callable[..., Any]
Make = Callable[[Random, Sequence[Tensor]], Call]
"""Draws a call for tensors without data; the same call then runs on all of them."""


def _dim(draw: Random, tensor: Tensor) -> int:
    return draw.randrange(-tensor.dim(), tensor.dim()) if tensor.dim() else 0


def _reshape(draw: Random, tensors: Sequence[Tensor]) -> Call:
    (tensor,) = tensors
    d, k, way = _dim(draw, tensor), draw.choice((2, 3, 4)), draw.randrange(8)
    e = _dim(draw, tensor)
    low, high = sorted((d % max(tensor.dim(), 1), e % max(tensor.dim(), 1)))
    return (
        lambda a: a.reshape(-1),
        lambda a: a.reshape(-1, k),
        lambda a: a.reshape(k, -1),
        lambda a: a.reshape(a.shape[d], -1),
        lambda a: a.reshape(-1, a.shape[d]),
        lambda a: a.flatten(low, high),
        lambda a: a.unflatten(d, (-1, k)),
        lambda a: a.unflatten(d, (k, -1)),
    )[way]


def _of_dim(*calls: Callable[[Tensor, int], Any]) -> Make:
    def make(draw: Random, tensors: Sequence[Tensor]) -> Call:
        call, d = draw.choice(calls), _dim(draw, tensors[0])
        return lambda *given: call(*given, d)

    return make


def _of_dims(*calls: Callable[[Tensor, int, int], Any]) -> Make:
    def make(draw: Random, tensors: Sequence[Tensor]) -> Call:
        call, d, e = draw.choice(calls), _dim(draw, tensors[0]), _dim(draw, tensors[0])
        return lambda a: call(a, d, e)

    return make


def _any_of(*calls: Call) -> Make:
    return lambda draw, tensors: draw.choice(calls)


def _named(module: Any, names: str) -> list[Call]:
    """Functions of a module, by their names."""
    return [getattr(module, name) for name in names.split()]


def _methods(names: str) -> list[Call]:
    """Methods of the first tensor, which get what else is given."""
    return [getattr(Tensor, name) for name in names.split()]


def _own_places(a: Tensor, d: int) -> Tensor:
    return torch.arange(a.shape[d])


ONE: list[Make] = [
    _reshape,
    _reshape,
    _any_of(
        *_named(torch, "tanh sigmoid relu neg abs"),
        *_named(functional, "gelu logsigmoid softplus"),
        *_methods("clone contiguous detach long int"),
        lambda a: 1 - a,
        lambda a: 2 * a + 1,
        lambda a: a / 3,
        lambda a: a.clamp(-1, 1),
        lambda a: a.float().double(),
        lambda a: a > 0,
        lambda a: a.masked_fill(a > 0.5, 0.0),
        lambda a: torch.where(a > 0, a, 0.0),
        lambda a: a.nan_to_num(),
        lambda a: torch.zeros_like(a),
        lambda a: torch.ones_like(a).cumsum(-1),
        lambda a: a.new_zeros(a.shape[0], 3),
        lambda a: a.new_ones(a.shape),
        lambda a: a.view(torch.int64),
        lambda a: a.view(torch.float32),
    ),
    _any_of(
        *_named(torch, "sum mean amax std cov trace combinations"),
        *_methods("norm tril squeeze argsort"),
        lambda a: a.sum() / a.shape[0],
        lambda a: a.sum() / a.shape[-1],
        lambda a: a.sum() / a.numel(),
        lambda a: a.sum(0) / a.shape[0],
        lambda a: a.sum() / (2 * a.shape[0]),
        lambda a: a.norm(dim=-1),
        lambda a: torch.linalg.vector_norm(a, dim=-1, keepdim=True),
        lambda a: functional.normalize(a, dim=-1),
        lambda a: functional.normalize(a, dim=0),
        lambda a: functional.layer_norm(a, a.shape[1:]),
        lambda a: functional.rms_norm(a, a.shape[-1:]),
        lambda a: functional.group_norm(a, 2),
        lambda a: functional.instance_norm(a),
        lambda a: functional.avg_pool1d(a, 2),
        lambda a: functional.max_pool1d(a, 2),
        lambda a: functional.max_pool2d(a, 2),
        lambda a: functional.adaptive_avg_pool1d(a, 2),
        lambda a: functional.interpolate(a, scale_factor=2),
        lambda a: functional.pad(a, (1, 0)),
        lambda a: functional.pad(a, (0, 0, 1, 0)),
        lambda a: functional.local_response_norm(a, 2),
        lambda a: torch.cdist(a, a),
        lambda a: a.T if a.dim() == 2 else a,
        lambda a: a @ a.mT,
        lambda a: a.mT @ a,
        lambda a: torch.einsum("ij,ik->ijk", a, a),
        lambda a: torch.einsum("ij,kj->ik", a, a),
        lambda a: torch.einsum("bij,bkj->bik", a, a),
        lambda a: torch.einsum("bij,bik->jk", a, a),
        lambda a: a[:, None] * a[None, :],
        lambda a: a[:, None] - a[:, :, None],
        lambda a: a[..., None, :],
        lambda a: a[:, 0],
        lambda a: a[0],
        lambda a: a[:, :2],
        lambda a: a[1:],
        lambda a: a[: a.shape[0]],
        lambda a: a[::2],
        lambda a: a[a > 0],
        lambda a: a[torch.arange(a.shape[0])],
        lambda a: a[torch.arange(a.shape[0]), 0],
        lambda a: a[torch.arange(a.shape[0])[:, None], torch.tensor([1, 0])],
        lambda a: a[:, torch.tensor([1, 0])],
        lambda a: a[torch.tensor([1, 0])],
        lambda a: a.triu(1),
        lambda a: a.diagonal(dim1=-2, dim2=-1),
        lambda a: torch.diag_embed(a),
        lambda a: torch.block_diag(a, a),
        lambda a: a.squeeze(-1),
        lambda a: a.repeat(2, 1),
        lambda a: a.repeat(1, 2),
        lambda a: a.tile(2),
        lambda a: torch.stack([a.mean(), a.sum() / a.shape[0]]),
        lambda a: a.mean().expand(3),
        lambda a: a.mean(0).repeat(2),
        lambda a: torch.outer(a, a),
        lambda a: torch.kron(a, a),
        lambda a: torch.cartesian_prod(a, a),
        lambda a: torch.renorm(a, 2, 0, 1.0),
        lambda a: functional.one_hot(a.long().clamp(0, 3), 4),
        lambda a: functional.kl_div(a.log_softmax(-1), a.softmax(-1), reduction="batchmean"),
        lambda a: functional.unfold(a, 2),
        lambda a: torch.bucketize(a, torch.tensor([-1.0, 0.0, 1.0])),
        lambda a: torch.isin(a, torch.tensor([0, 1, 2])),
        lambda a: a.topk(2).values,
        lambda a: a.topk(2).indices,
        lambda a: a.sort(descending=True).indices,
        lambda a: a.gather(-1, a.argsort(-1)),
        lambda a: functional.glu(a),
        lambda a: torch.view_as_complex(a.unflatten(-1, (-1, 2))).abs(),
        lambda a: torch.fft.rfft(a).abs(),
        lambda a: a.repeat_interleave(2, dim=0),
        lambda a: a.repeat_interleave(2, dim=-1),
        lambda a: torch.rot90(a),
        lambda a: torch.meshgrid(a, a, indexing="ij")[0],
        lambda a: functional.scaled_dot_product_attention(a, a, a),
        lambda a: functional.scaled_dot_product_attention(a[:, None], a[:, None], a[:, None]),
        lambda a: functional.scaled_dot_product_attention(a, a, a, is_causal=True),
        lambda a: functional.pixel_shuffle(a[..., None, None], 2),
    ),
    _of_dim(
        *_methods("sum mean softmax log_softmax cumsum amax flip unsqueeze squeeze cumprod"),
        *_named(functional, "softmin"),
        lambda a, d: a.mean(d, keepdim=True),
        lambda a, d: a.sum(d) / a.shape[d],
        lambda a, d: a.max(d).values,
        lambda a, d: a.max(d).indices,
        lambda a, d: a.argmin(d, keepdim=True),
        lambda a, d: a.sort(d).values,
        lambda a, d: a.roll(1, d),
        lambda a, d: a.select(d, 0),
        lambda a, d: a.select(d, -1),
        lambda a, d: a.narrow(d, 0, 1),
        lambda a, d: a.narrow(d, 0, a.shape[d]),
        lambda a, d: a.unfold(d, 2, 1),
        lambda a, d: a.chunk(2, d)[0],
        lambda a, d: a.unbind(d)[0],
        lambda a, d: a.split(2, d)[0],
        lambda a, d: torch.stack([a, 2 * a], d),
        lambda a, d: torch.cat([a, 2 * a], d),
        *_named(torch, "logsumexp var"),
        lambda a, d: torch.diff(a, dim=d),
        lambda a, d: torch.nn.functional.gumbel_softmax(a.new_zeros(3), dim=0),
        lambda a, d: a.index_select(d, torch.tensor([1, 0])),
        lambda a, d: a.index_select(d, _own_places(a, d)),
        lambda a, d: a.expand(3, *a.shape),
        lambda a, d: a.new_zeros(a.shape[d]),
        lambda a, d: _own_places(a, d),
        lambda a, d: torch.full((a.shape[d], 2), 3.0),
        lambda a, d: a.median(d).values,
        lambda a, d: torch.renorm(a, 2, d, 1.0),
        lambda a, d: functional.normalize(a, dim=d),
        lambda a, d: a.repeat_interleave(2, dim=d),
        lambda a, d: torch.zeros_like(a).scatter(d, a.long().clamp(0, 1), 1.0),
        lambda a, d: torch.zeros_like(a).scatter_add(d, a.long().clamp(0, 1), a),
        lambda a, d: torch.zeros_like(a).index_add(d, _own_places(a, d), a),
        lambda a, d: torch.take_along_dim(a, a.argsort(d), d),
        lambda a, d: a.index_fill(d, torch.tensor([0]), 1.0),
        lambda a, d: a.movedim(d, 0),
        lambda a, d: a.tensor_split(2, d)[0],
    ),
    _of_dims(
        *_methods("transpose movedim flip"),
        lambda a, d, e: a.diagonal(0, d, e),
        lambda a, d, e: a.sum((d, e)),
        lambda a, d, e: a.mean((d, e)),
        lambda a, d, e: a.transpose(d, e).reshape(a.shape),
        lambda a, d, e: a.transpose(d, e).flatten(),
        lambda a, d, e: a.transpose(d, e).reshape(-1, a.shape[d]),
        lambda a, d, e: torch.tensordot(a, a, dims=([d], [e])),
    ),
]

TWO: list[Make] = [
    _any_of(
        *_named(operator, "add sub mul truediv matmul"),
        *_named(torch, "maximum ge eq clamp fmod hypot xlogy outer bmm mv dot cdist addcmul"),
        *_named(functional, "linear mse_loss l1_loss huber_loss smooth_l1_loss soft_margin_loss"),
        *_named(functional, "prelu pairwise_distance cosine_similarity poisson_nll_loss conv1d"),
        *_named(functional, "pdist bilinear"),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: functional.binary_cross_entropy_with_logits(a, b.sigmoid()),
        lambda a, b: functional.binary_cross_entropy_with_logits(
            a, a.sigmoid(), weight=b.sigmoid()
        ),
        lambda a, b: functional.binary_cross_entropy_with_logits(
            a, a.sigmoid(), pos_weight=b.sigmoid()
        ),
        lambda a, b: functional.cross_entropy(a, b.long().clamp(0, 1), reduction="none"),
        lambda a, b: functional.cross_entropy(a, b.long().clamp(0, 1), reduction="sum"),
        lambda a, b: functional.cross_entropy(a, b.long().clamp(0, 1), label_smoothing=0.1),
        lambda a, b: functional.cross_entropy(a, b.softmax(-1)),
        lambda a, b: functional.mse_loss(a, b, reduction="sum"),
        lambda a, b: functional.mse_loss(a, b, reduction="none"),
        lambda a, b: functional.embedding(a.long().clamp(0, 1), b),
        lambda a, b: b[a.long().clamp(0, 1)],
        lambda a, b: b[:, a.long().clamp(0, 1)],
        lambda a, b: b[torch.arange(b.shape[0]), a.long().clamp(0, 1)],
        lambda a, b: a.scatter(1, b.long().clamp(0, 1), 1.0),
        lambda a, b: a.gather(1, b.long().clamp(0, 1)),
        lambda a, b: a.repeat_interleave(b, dim=0),
        lambda a, b: a.index_add(0, torch.arange(b.shape[0]), b),
        lambda a, b: torch.einsum("bi,bj->bij", a, b),
        lambda a, b: torch.einsum("bi,bi->b", a, b),
        lambda a, b: torch.einsum("bi,bi->i", a, b),
        lambda a, b: torch.einsum("bi,ij->bj", a, b),
        lambda a, b: torch.addmm(b, a, a.new_ones(a.shape[-1], 3)),
        lambda a, b: torch.baddbmm(a, b, b.mT),
        lambda a, b: a.expand_as(b),
        lambda a, b: a.view_as(b),
        lambda a, b: torch.lerp(a, b, 0.3),
        lambda a, b: functional.triplet_margin_loss(a, b, -a),
        lambda a, b: functional.margin_ranking_loss(a, b, torch.sign(a)),
        lambda a, b: functional.layer_norm(a, b.shape, b),
        lambda a, b: torch.searchsorted(a, b),
        lambda a, b: (a - b.mean()).square().mean(),
        lambda a, b: a.mean() * b + a.mean(),
        lambda a, b: (a * b).sum() / a.shape[0],
        lambda a, b: (a.sum(-1) * b).mean(),
        lambda a, b: a.index_put((torch.arange(a.shape[0]),), b),
        lambda a, b: a.masked_scatter(a > 0, b),
        lambda a, b: a.slice_scatter(b, 0),
        lambda a, b: a.select_scatter(b, 1, 0),
        lambda a, b: functional.cosine_embedding_loss(a, b, torch.ones(())),
    ),
    _of_dim(
        lambda a, b, d: torch.cat([a, b], d),
        lambda a, b, d: torch.stack([a, b], d),
        lambda a, b, d: a.index_select(d, b),
        lambda a, b, d: a.gather(d, b.long().clamp(0, 1)),
        lambda a, b, d: a.index_add(d, b, a),
    ),
]


def _written(write: Callable[..., Any]) -> Call:
    def call(*tensors: Tensor) -> Tensor:
        write(*tensors)
        return tensors[0]

    return call


WRITING: list[Make] = [
    _any_of(
        _written(lambda a, b: a.add_(b)),
        _written(lambda a, b: a.mul_(b)),
        _written(lambda a, b: a.copy_(b)),
        _written(lambda a, b: a.zero_()),
        _written(lambda a, b: a[:, 0].copy_(b)),
        _written(lambda a, b: a[:, :1].fill_(1.0)),
        _written(lambda a, b: a[0].zero_()),
        _written(lambda a, b: a.view(-1).add_(b.reshape(-1))),
        _written(lambda a, b: a.T.mul_(b)),
        _written(lambda a, b: a.masked_fill_(b > 0, 0.0)),
        _written(lambda a, b: a.__setitem__(slice(None, 1), 0.0)),
        _written(lambda a, b: a.__setitem__((slice(None), 0), b)),
        _written(lambda a, b: a.index_add_(0, torch.arange(b.shape[0]), b)),
        _written(lambda a, b: a.scatter_(1, b.long().clamp(0, 1), 1.0)),
        _written(lambda a, b: a.t_()),
        _written(lambda a, b: a.unsqueeze_(0)),
        _written(lambda a, b: torch._foreach_add_([a], [b])),
    ),
]
