"""Calls of PyTorch to draw from: of one tensor, of two, and those that write."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from functools import wraps
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
        return wraps(call)(lambda *given: call(*given, d))

    return make


def _of_dims(*calls: Callable[[Tensor, int, int], Any]) -> Make:
    def make(draw: Random, tensors: Sequence[Tensor]) -> Call:
        call, d, e = draw.choice(calls), _dim(draw, tensors[0]), _dim(draw, tensors[0])
        return wraps(call)(lambda a: call(a, d, e))

    return make


def _any_of(*calls: Call) -> Make:
    return lambda draw, tensors: draw.choice(calls)


def _named(module: Any, names: str) -> list[Call]:
    """Functions of a module, by their names."""
    return [getattr(module, name) for name in names.split()]


def _methods(names: str) -> list[Call]:
    """Methods of the first tensor, which get what else is given."""
    return [getattr(Tensor, name) for name in names.split()]


def _calls(arguments: str, text: str) -> list[Call]:
    """Functions of these arguments; what each gives is a line of the text, or a part of one."""
    found = []
    for line in filter(None, map(str.strip, re.split("[;\n]", text))):
        found.append(eval(f"lambda {arguments}: {line}"))
        found[-1].__name__ = line
    return found


def _own_places(a: Tensor, d: int) -> Tensor:
    return torch.arange(a.shape[d])


ONE: list[Make] = [
    _reshape,
    _reshape,
    _any_of(
        *_named(torch, "tanh sigmoid relu neg abs"),
        *_named(functional, "gelu logsigmoid softplus"),
        *_methods("clone contiguous detach long int"),
        *_calls(
            "a",
            """
            1 - a; 2 * a + 1; a / 3; a.clamp(-1, 1); a.float().double(); a > 0;
            a.masked_fill(a > 0.5, 0.0); torch.where(a > 0, a, 0.0); a.nan_to_num();
            torch.zeros_like(a); torch.ones_like(a).cumsum(-1); a.new_zeros(a.shape[0], 3);
            a.new_ones(a.shape); a.view(torch.int64); a.view(torch.float32)
            """,
        ),
    ),
    _any_of(
        *_named(torch, "sum mean amax std cov trace combinations"),
        *_methods("norm tril squeeze argsort"),
        *_calls(
            "a",
            """
            a.sum() / a.shape[0]; a.sum() / a.shape[-1]; a.sum() / a.numel(); a.sum(0) / a.shape[0];
            a.sum() / (2 * a.shape[0]); a.norm(dim=-1);
            torch.linalg.vector_norm(a, dim=-1, keepdim=True); functional.normalize(a, dim=-1);
            functional.normalize(a, dim=0); functional.layer_norm(a, a.shape[1:]);
            functional.rms_norm(a, a.shape[-1:]); functional.group_norm(a, 2);
            functional.instance_norm(a); functional.avg_pool1d(a, 2); functional.max_pool1d(a, 2);
            functional.max_pool2d(a, 2); functional.adaptive_avg_pool1d(a, 2);
            functional.interpolate(a, scale_factor=2); functional.pad(a, (1, 0));
            functional.pad(a, (0, 0, 1, 0)); functional.local_response_norm(a, 2);
            torch.cdist(a, a); a.T if a.dim() == 2 else a; a @ a.mT; a.mT @ a;
            torch.einsum("ij,ik->ijk", a, a); torch.einsum("ij,kj->ik", a, a);
            torch.einsum("bij,bkj->bik", a, a); torch.einsum("bij,bik->jk", a, a);
            a[:, None] * a[None, :]; a[:, None] - a[:, :, None]; a[..., None, :]; a[:, 0]; a[0];
            a[:, :2]; a[1:]; a[: a.shape[0]]; a[::2]; a[a > 0]; a[torch.arange(a.shape[0])];
            a[torch.arange(a.shape[0]), 0];
            a[torch.arange(a.shape[0])[:, None], torch.tensor([1, 0])]; a[:, torch.tensor([1, 0])];
            a[torch.tensor([1, 0])]; a.triu(1); a.diagonal(dim1=-2, dim2=-1); torch.diag_embed(a);
            torch.block_diag(a, a); a.squeeze(-1); a.repeat(2, 1); a.repeat(1, 2); a.tile(2);
            torch.stack([a.mean(), a.sum() / a.shape[0]]); a.mean().expand(3); a.mean(0).repeat(2);
            torch.outer(a, a); torch.kron(a, a); torch.cartesian_prod(a, a);
            torch.renorm(a, 2, 0, 1.0); functional.one_hot(a.long().clamp(0, 3), 4);
            functional.kl_div(a.log_softmax(-1), a.softmax(-1), reduction="batchmean");
            functional.unfold(a, 2); torch.bucketize(a, torch.tensor([-1.0, 0.0, 1.0]));
            torch.isin(a, torch.tensor([0, 1, 2])); a.topk(2).values; a.topk(2).indices;
            a.sort(descending=True).indices; a.gather(-1, a.argsort(-1)); functional.glu(a);
            torch.view_as_complex(a.unflatten(-1, (-1, 2))).abs(); torch.fft.rfft(a).abs();
            a.repeat_interleave(2, dim=0); a.repeat_interleave(2, dim=-1); torch.rot90(a);
            torch.meshgrid(a, a, indexing="ij")[0];
            functional.scaled_dot_product_attention(a, a, a);
            functional.scaled_dot_product_attention(a[:, None], a[:, None], a[:, None]);
            functional.scaled_dot_product_attention(a, a, a, is_causal=True);
            functional.pixel_shuffle(a[..., None, None], 2)
            """,
        ),
    ),
    _of_dim(
        *_methods("sum mean softmax log_softmax cumsum amax flip unsqueeze squeeze cumprod"),
        *_named(functional, "softmin"),
        *_calls(
            "a, d",
            """
            a.mean(d, keepdim=True); a.sum(d) / a.shape[d]; a.max(d).values; a.max(d).indices;
            a.argmin(d, keepdim=True); a.sort(d).values; a.roll(1, d); a.select(d, 0);
            a.select(d, -1); a.narrow(d, 0, 1); a.narrow(d, 0, a.shape[d]); a.unfold(d, 2, 1);
            a.chunk(2, d)[0]; a.unbind(d)[0]; a.split(2, d)[0]; torch.stack([a, 2 * a], d);
            torch.cat([a, 2 * a], d)
            """,
        ),
        *_named(torch, "logsumexp var"),
        *_calls(
            "a, d",
            """
            torch.diff(a, dim=d); torch.nn.functional.gumbel_softmax(a.new_zeros(3), dim=0);
            a.index_select(d, torch.tensor([1, 0])); a.index_select(d, _own_places(a, d));
            a.expand(3, *a.shape); a.new_zeros(a.shape[d]); _own_places(a, d);
            torch.full((a.shape[d], 2), 3.0); a.median(d).values; torch.renorm(a, 2, d, 1.0);
            functional.normalize(a, dim=d); a.repeat_interleave(2, dim=d);
            torch.zeros_like(a).scatter(d, a.long().clamp(0, 1), 1.0);
            torch.zeros_like(a).scatter_add(d, a.long().clamp(0, 1), a);
            torch.zeros_like(a).index_add(d, _own_places(a, d), a);
            torch.take_along_dim(a, a.argsort(d), d); a.index_fill(d, torch.tensor([0]), 1.0);
            a.movedim(d, 0); a.tensor_split(2, d)[0]
            """,
        ),
    ),
    _of_dims(
        *_methods("transpose movedim flip"),
        *_calls(
            "a, d, e",
            """
            a.diagonal(0, d, e); a.sum((d, e)); a.mean((d, e)); a.transpose(d, e).reshape(a.shape);
            a.transpose(d, e).flatten(); a.transpose(d, e).reshape(-1, a.shape[d]);
            torch.tensordot(a, a, dims=([d], [e]))
            """,
        ),
    ),
]

TWO: list[Make] = [
    _any_of(
        *_named(operator, "add sub mul truediv matmul"),
        *_named(torch, "maximum ge eq clamp fmod hypot xlogy outer bmm mv dot cdist addcmul"),
        *_named(functional, "linear mse_loss l1_loss huber_loss smooth_l1_loss soft_margin_loss"),
        *_named(functional, "prelu pairwise_distance cosine_similarity poisson_nll_loss conv1d"),
        *_named(functional, "pdist bilinear"),
        *_calls(
            "a, b",
            """
            torch.where(a > 0, a, b); functional.binary_cross_entropy_with_logits(a, b.sigmoid());
            functional.binary_cross_entropy_with_logits(a, a.sigmoid(), weight=b.sigmoid());
            functional.binary_cross_entropy_with_logits(a, a.sigmoid(), pos_weight=b.sigmoid());
            functional.cross_entropy(a, b.long().clamp(0, 1), reduction="none");
            functional.cross_entropy(a, b.long().clamp(0, 1), reduction="sum");
            functional.cross_entropy(a, b.long().clamp(0, 1), label_smoothing=0.1);
            functional.cross_entropy(a, b.softmax(-1)); functional.mse_loss(a, b, reduction="sum");
            functional.mse_loss(a, b, reduction="none");
            functional.embedding(a.long().clamp(0, 1), b); b[a.long().clamp(0, 1)];
            b[:, a.long().clamp(0, 1)]; b[torch.arange(b.shape[0]), a.long().clamp(0, 1)];
            a.scatter(1, b.long().clamp(0, 1), 1.0); a.gather(1, b.long().clamp(0, 1));
            a.repeat_interleave(b, dim=0); a.index_add(0, torch.arange(b.shape[0]), b);
            torch.einsum("bi,bj->bij", a, b); torch.einsum("bi,bi->b", a, b);
            torch.einsum("bi,bi->i", a, b); torch.einsum("bi,ij->bj", a, b);
            torch.addmm(b, a, a.new_ones(a.shape[-1], 3)); torch.baddbmm(a, b, b.mT);
            a.expand_as(b); a.view_as(b); torch.lerp(a, b, 0.3);
            functional.triplet_margin_loss(a, b, -a);
            functional.margin_ranking_loss(a, b, torch.sign(a));
            functional.layer_norm(a, b.shape, b); torch.searchsorted(a, b);
            (a - b.mean()).square().mean(); a.mean() * b + a.mean(); (a * b).sum() / a.shape[0];
            (a.sum(-1) * b).mean(); a.index_put((torch.arange(a.shape[0]),), b);
            a.masked_scatter(a > 0, b); a.slice_scatter(b, 0); a.select_scatter(b, 1, 0);
            functional.cosine_embedding_loss(a, b, torch.ones(()))
            """,
        ),
    ),
    _of_dim(
        *_calls(
            "a, b, d",
            """
            torch.cat([a, b], d); torch.stack([a, b], d); a.index_select(d, b);
            a.gather(d, b.long().clamp(0, 1)); a.index_add(d, b, a)
            """,
        )
    ),
]


def _written(write: Callable[..., Any]) -> Call:
    @wraps(write)
    def call(*tensors: Tensor) -> Tensor:
        write(*tensors)
        return tensors[0]

    return call


WRITING: list[Make] = [
    _any_of(
        *map(
            _written,
            _calls(
                "a, b",
                """
                a.add_(b); a.mul_(b); a.copy_(b); a.zero_(); a[:, 0].copy_(b); a[:, :1].fill_(1.0);
                a[0].zero_(); a.view(-1).add_(b.reshape(-1)); a.T.mul_(b);
                a.masked_fill_(b > 0, 0.0); a.__setitem__(slice(None, 1), 0.0);
                a.__setitem__((slice(None), 0), b); a.index_add_(0, torch.arange(b.shape[0]), b);
                a.scatter_(1, b.long().clamp(0, 1), 1.0); a.t_(); a.unsqueeze_(0);
                torch._foreach_add_([a], [b])
                """,
            ),
        )
    )
]
