"""Elementwise operators, and losses that average their entries.

Elementwise operators keep samples apart if batch dims coincide. From means and sums over samples
only linear operators make a mean or a sum again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchrec_picasso.proof.call import Call, Operand, rule
from torchrec_picasso.proof.sizes import is_symbolic
from torchrec_picasso.proof.values import SAME, SAMPLES, Kind, UnprovedError, Value, plain

__all__ = ["pointwise"]

_COPIES = ("_to_copy", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "positive")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_SUMS = ("add", "sub", "rsub", "copy", "neg", *_COPIES)
_NO_REDUCTION, _MEAN = 0, 1

RATIO = "If a loss is a ratio of two sums, give both sums and divide nothing"


@rule(
    "_to_copy clone detach alias lift_fresh lift_fresh_copy copy fill zero prelu _prelu_kernel "
    "floor_divide bucketize isin special_expit dropout_backward xlogy "
    "logical_and logical_or logical_not logical_xor masked_fill where"
)
def pointwise(call: Call) -> Value | Sequence[Value]:
    """Applies to any elementwise operator."""
    return _elementwise(call)


def _elementwise(call: Call) -> Value:
    """Derives the value of an elementwise operator from its operands."""
    varying = call.varying
    if call.name in _COPIES and len(varying) == 1:
        return _copied(call, varying[0])
    if call.name in ("fill", "zero"):
        return _filled(call)
    if any(operand.value.is_partial for operand in varying):
        return _linear(call)
    call.refuse_numbers()
    if not varying:
        return SAME
    if len(varying) == 1 and varying[0].value.kind is Kind.LOOKUPS:
        return _of_lookups(call, varying[0])
    operands = call.operands
    if call.name in ("bucketize", "isin"):
        operands = varying
        if [operand.name for operand in varying] not in (["self"], ["elements"]):
            raise UnprovedError("looks entries up in a list that depends on the batch")
    found = call.aligned(operands)
    if any(operand.value.counted for operand in varying):
        return _difference(call, varying, found)
    return found


def _copied(call: Call, operand: Operand) -> Value:
    """Copies entries, perhaps to another dtype."""
    value, dtype = operand.value, call.outputs[0].dtype
    call.refuse_numbers()
    if value.is_partial and not dtype.is_floating_point and dtype != operand.tensor.dtype:
        raise UnprovedError(f"rounds {value.kind.value}")
    is_exact = dtype in (torch.int64, torch.int32)
    if (value.counted or value.kind is Kind.OFFSETS) and not is_exact:
        # positions and offsets must stay exact integers
        raise UnprovedError("makes other numbers of places in the batch")
    return value if is_exact or value.kind is not Kind.ROWS else plain(value)


def _filled(call: Call) -> Value:
    """Fills a tensor in place; its old entries do not matter, only its rows."""
    call.refuse_numbers()
    filled = call.of("self").value
    value = call.find("value")
    if value is not None and not value.is_same:
        raise UnprovedError(f"fills a tensor with {value.value.kind.value}")
    if filled.kind is Kind.ROWS:
        return Value(Kind.ROWS, rows=filled.rows, outer=filled.outer)
    if filled.kind is Kind.SAME or filled.is_partial:
        return SAME
    raise UnprovedError(f"writes into {filled.kind.value}")


def _of_lookups(call: Call, operand: Operand) -> Value:
    """Maps the lookups of several features, with scalar constants only."""
    for other in call.operands:
        if other.is_same and other.tensor.numel() != 1:
            raise UnprovedError("has different constants for different lookups")
    return operand.value


def _difference(call: Call, varying: list[Operand], found: Value) -> Value:
    """Allows comparison and subtraction of positions in the same rows: both start at one row."""
    counted = {operand.value.counted for operand in call.operands}
    is_of_two = len(call.operands) == 2 and len(varying) == 2 and len(counted) == 1
    if is_of_two and call.name in _COMPARISONS:
        return found
    if is_of_two and call.name == "sub" and call.args.get("alpha", 1) == 1:
        return found
    raise UnprovedError("computes with places in the batch")


def _linear(call: Call) -> Value:
    """Combines means and sums over samples: linear operators give a mean or a sum again."""
    kinds = {operand.value.kind for operand in call.operands}
    partial = [operand for operand in call.operands if operand.value.is_partial]
    if call.name == "div" and partial[0].name == "self" and len(partial) == 1:
        return _divided(call, partial[0])
    if kinds - {Kind.SAME, Kind.MEAN, Kind.SUM}:
        raise UnprovedError(f"combines entries of samples with {partial[0].value.kind.value}")
    call.refuse_numbers()
    if call.name == "mul" and len(partial) == 1:
        return Value(partial[0].value.kind)
    if call.name in _SUMS and not call.outputs[0].dtype.is_floating_point:
        raise UnprovedError(f"rounds {partial[0].value.kind.value}")
    # mean + constant stays a mean; sum + constant does not, since each part would add it
    if call.name in _SUMS and kinds <= {Kind.SAME, Kind.MEAN}:
        return Value(Kind.MEAN)
    if call.name in _SUMS and kinds == {Kind.SUM} and not _has_plain_number(call):
        return Value(Kind.SUM)
    if call.name in _SUMS:
        raise UnprovedError("adds a sum over samples to what is none")
    if call.name == "div":
        raise UnprovedError(f"divides by {partial[-1].value.kind.value}. {RATIO}")
    raise UnprovedError(f"is not linear in {partial[0].value.kind.value}")


def _has_plain_number(call: Call) -> bool:
    """Whether a plain number other than 0 is added."""
    other = call.args.get("other")
    return isinstance(other, int | float) and other != 0


def _divided(call: Call, divided: Operand) -> Value:
    """Divides a mean or a sum: by a constant, or a sum by the number of samples."""
    divisor: Any = call.args["other"]
    if call.args.get("rounding_mode") is not None:
        raise UnprovedError(f"rounds {divided.value.kind.value}")
    if not is_symbolic(divisor):
        return Value(divided.value.kind)
    if divided.value.kind is Kind.SUM and call.sizes.times(divisor, SAMPLES) is not None:
        return Value(Kind.MEAN)
    raise UnprovedError(
        f"divides {divided.value.kind.value} by another number than that of samples"
    )


@rule(
    "binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss "
    "huber_loss soft_margin_loss"
)
def loss(call: Call) -> Value:
    """Computes a loss of each entry, then returns the entries, their mean or their sum."""
    call.refuse_numbers()
    if any(operand.value.is_partial or operand.value.counted for operand in call.varying):
        raise UnprovedError("is not linear in means over samples")
    found = call.aligned(call.operands)
    reduction = call.args["reduction"]
    if found.kind is Kind.SAME or reduction == _NO_REDUCTION:
        return found
    if reduction != _MEAN:
        return Value(Kind.SUM)
    # a mean over entries is a mean over samples only if there is one row per sample
    call.sizes.want_same(SAMPLES, found.rows, call.where)
    return Value(Kind.MEAN)


@rule("log_sigmoid_forward")
def log_sigmoid(call: Call) -> list[Value]:
    """Elementwise, with a second output for its backward."""
    return call.with_scratch(_elementwise(call))


@rule("nll_loss_forward nll_loss2d_forward")
def nll_loss(call: Call) -> list[Value]:
    """Computes a loss of each row; its mean divides by the targets that are not ignored."""
    logits, target = call.of("self"), call.of("target")
    weight = call.find("weight")
    if logits.value.kind is not Kind.ROWS or logits.value.dim or target.value.kind is not Kind.ROWS:
        raise UnprovedError("has targets from elsewhere than its samples")
    if target.value.counted or (weight is not None and not weight.is_same):
        raise UnprovedError("has targets that are places in the batch: other samples are negatives")
    found = call.same_rows([logits, target])
    if call.args["reduction"] == _NO_REDUCTION:
        return [found, SAME]
    if call.args["reduction"] == _MEAN:
        raise UnprovedError(
            "divides by the targets that are not ignored, whose share differs; take reduction="
            "'none' and the mean of that"
        )
    return [Value(Kind.SUM), Value(Kind.SUM)]


@rule("native_dropout bernoulli")
def dropout(call: Call) -> Value:
    """Draws noise for each entry of each sample."""
    if any(operand.value.kind is not Kind.ROWS for operand in call.operands):
        raise UnprovedError("draws random numbers that samples share, others in each micro-batch")
    if any(operand.value.counted for operand in call.operands):
        raise UnprovedError("computes with places in the batch")
    return call.aligned(call.operands)
