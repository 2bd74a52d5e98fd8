"""Decides whether two computations of the same samples differ by more than rounding.

Gradients and outputs are compared sample by sample, in two ways. The *mean* difference detects
large errors of some samples, such as a loss over clicked samples only; it tolerates a few samples
that cross a kink or a tie, where rounding decides. The *median* detects small errors of all
samples, such as an auxiliary loss of small weight.

Shape letters: B samples, or lookups of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import children_of

__all__ = ["Tolerance", "difference_of", "difference_of_outputs"]

_NEGLIGIBLE = 1e-3
"""Share of the mean that small samples count as, so that noise around 0 is not relative."""


class Tolerance:
    """Limits of the differences that rounding may cause.

    Float32 sums over another number of samples differ in their last bits, 1e-7 to 1e-5 after many
    layers, which leaves the limits a factor of ten. A kink that is crossed changes one sample of
    thousands by a few percent: less than the limit of the mean. Coarser types, by whose rounding
    step ``eps`` the limits grow, round in the forward itself, once per operator.
    """

    def __init__(self, eps: float) -> None:
        self.mean = max(1e-3, 4 * eps)
        self.median = max(1e-4, 4 * eps)


def difference_of(whole: Tensor, cut: Tensor, tolerance: Tolerance) -> str | None:
    """Says how much a float tensor, ``(B, ...)`` or a scalar, differs; ``None`` = within limits.

    What is not a number differs.
    """
    if whole.shape != cut.shape:
        return f"has shape {tuple(cut.shape)} instead of {tuple(whole.shape)}"
    if not whole.numel():
        return None
    # per sample: |whole| and |cut - whole|, each summed over the other dims
    whole, cut = whole.detach(), cut.detach()
    whole_B, off_B = _sizes(whole, cut)
    if not whole_B.isfinite().all():
        if whole.isnan().any():
            return "is not a number, so it cannot be compared"
        endless = whole.isinf() & (whole == cut)
        whole_B, off_B = _sizes(whole.masked_fill(endless, 0), cut.masked_fill(endless, 0))
    wide = whole_B.dtype
    mean = float(off_B.mean() / whole_B.mean().clamp_min(torch.finfo(wide).tiny))
    floor = (_NEGLIGIBLE * whole_B.mean()).clamp_min(torch.finfo(wide).tiny)
    median = float((off_B / torch.maximum(whole_B, floor)).median())
    if mean <= tolerance.mean and median <= tolerance.median:
        return None
    return f"differs by {100 * max(mean, median):.2g} %"


def _sizes(whole: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """Sums ``|whole|`` and ``|cut - whole|`` by sample, both ``(B,)``, in float32 at least."""
    wide = torch.promote_types(whole.dtype, torch.float32)
    num_samples = whole.size(0) if whole.dim() else 1
    flat, flat_cut = (each.reshape(num_samples, -1).to(wide) for each in (whole, cut))
    return flat.abs().sum(1), (flat_cut - flat).abs_().sum(1)


def difference_of_outputs(
    whole: Any, cut: Any, tolerance: Tolerance, path: str = "output"
) -> str | None:
    """Describes the first member in which a model's joined output differs from the whole one.

    Integers and booleans jump where rounding decides a tie, so a few of them may differ.
    """
    members = children_of(whole)
    if members is not None:
        pairs = zip(members, children_of(cut) or ())
        differences = (
            difference_of_outputs(member, other, tolerance, path + suffix)
            for (suffix, member), (_, other) in pairs
        )
        return next(filter(None, differences), None)
    one, other = _values(whole), _values(cut)
    if one is None or other is None:
        return None
    compare = difference_of if one.is_floating_point() else _difference_of_kinds
    found = compare(one, other, tolerance)
    return None if found is None else f"{path} {found}"


def _values(value: Any) -> Tensor | None:
    """Returns the tensor of a value, or ``None``."""
    if isinstance(value, (KeyedTensor, JaggedTensor)) and not isinstance(value, KeyedJaggedTensor):
        value = value.values()
    return value if isinstance(value, Tensor) else None


def _difference_of_kinds(whole: Tensor, cut: Tensor, tolerance: Tolerance) -> str | None:
    """Says in how many entries integers or booleans differ; ``None`` = in a few, or none."""
    if whole.shape != cut.shape:
        return f"has shape {tuple(cut.shape)} instead of {tuple(whole.shape)}"
    num_off = int((whole != cut).sum())
    if num_off <= max(1, tolerance.mean * whole.numel()):
        return None
    return f"differs in {num_off} of {whole.numel()} entries"
