"""Rules for operators that compute: elementwise, reductions, products, layers, constants.

Elementwise operators keep samples apart if batch dims coincide. From means and sums over samples
only linear operators make a mean or a sum again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrec_picasso.proof.call import Call, Operand, rule
from torchrec_picasso.proof.values import (
    SAME,
    SAMPLES,
    Kind,
    UnprovedError,
    Value,
    is_symbolic,
    plain,
)

__all__: list[str] = []

_COPIES = ("_to_copy", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "positive")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_SUMS = ("add", "sub", "rsub", "copy", "neg", *_COPIES)


@rule(
    "pointwise _to_copy detach alias lift_fresh lift_fresh_copy copy prelu _prelu_kernel "
    "floor_divide masked_fill where",
    numbers=True,
    partial=True,
    places=True,
)
def pointwise(call: Call) -> Value:
    """Applies to operators that PyTorch tags as pointwise, and to others that are elementwise."""
    varying = call.varying
    is_partial = any(operand.value.is_partial for operand in varying)
    if call.name == "div" and len(varying) == 1 and is_partial and varying[0].name == "self":
        return _divided(call, varying[0])
    if call.numbers:
        raise UnprovedError("uses the batch's size as a number")
    if call.name in _COPIES and len(varying) == 1:
        return _copied(call, varying[0])
    if is_partial:
        return _linear(call)
    found = call.aligned(call.operands)
    if any(operand.value.counted for operand in varying):
        # comparison and subtraction of positions in the same rows: both count from one row
        counted = {operand.value.counted for operand in call.operands}
        is_known = call.name in _COMPARISONS or (call.name == "sub" and call.args["alpha"] == 1)
        if len(call.operands) != 2 or len(varying) != 2 or len(counted) != 1 or not is_known:
            raise UnprovedError("computes with places in the batch")
    return found


def _copied(call: Call, operand: Operand) -> Value:
    """Copies entries, perhaps to another dtype."""
    value, dtype = operand.value, call.outputs[0].dtype
    if value.is_partial and not dtype.is_floating_point and dtype != operand.tensor.dtype:
        raise UnprovedError(f"rounds {value.kind.value}")
    is_exact = dtype in (torch.int64, torch.int32)
    if (value.counted or value.kind is Kind.OFFSETS) and not is_exact:
        # positions and offsets must stay exact integers
        raise UnprovedError("makes other numbers of places in the batch")
    return value if is_exact or value.kind is not Kind.ROWS else plain(value)


def _linear(call: Call) -> Value:
    """Combines means and sums over samples: linear operators give a mean or a sum again."""
    kinds = {operand.value.kind for operand in call.operands}
    partial = [operand for operand in call.operands if operand.value.is_partial]
    kind = partial[0].value.kind
    if kinds - {Kind.SAME, Kind.MEAN, Kind.SUM}:
        raise UnprovedError(f"combines entries of samples with {kind.value}")
    if call.name == "mul" and len(partial) == 1:
        return Value(kind)
    if call.name not in _SUMS:
        raise UnprovedError(
            f"is not linear in {kind.value}. If a loss is a ratio of two sums, give both sums and "
            "divide nothing"
        )
    if not call.outputs[0].dtype.is_floating_point:
        raise UnprovedError(f"rounds {kind.value}")
    # mean + constant stays a mean; sum + constant does not, since each part would add it
    if kinds <= {Kind.SAME, Kind.MEAN}:
        return Value(Kind.MEAN)
    other = call.args.get("other")
    if kinds == {Kind.SUM} and (isinstance(other, Tensor) or not other):
        return Value(Kind.SUM)
    raise UnprovedError("adds a sum over samples to what is none")


def _divided(call: Call, divided: Operand) -> Value:
    """Divides a mean or a sum: by a constant, or a sum by the number of samples."""
    divisor: Any = call.args["other"]
    if call.args.get("rounding_mode") is not None:
        raise UnprovedError(f"rounds {divided.value.kind.value}")
    if not is_symbolic(divisor):
        return Value(divided.value.kind)
    if divided.value.kind is Kind.SUM and call.sizes.times(divisor, SAMPLES) is not None:
        return Value(Kind.MEAN)
    kind = divided.value.kind.value
    raise UnprovedError(f"divides {kind} by another number than that of samples")


@rule("fill zero", partial=True, places=True)
def filled(call: Call) -> Value:
    """Fills a tensor in place; its old entries do not matter, only its rows."""
    before = call.operand("self").value
    if any(operand.name == "value" for operand in call.varying):
        raise UnprovedError("fills a tensor with a value that depends on the batch")
    if before.kind is Kind.ROWS:
        return plain(before)
    if before.is_partial:
        return SAME
    raise UnprovedError(f"writes into {before.kind.value}")


@rule("native_dropout bernoulli")
def dropout(call: Call) -> Value:
    """Draws noise for each entry of each sample."""
    if any(operand.is_same for operand in call.operands):
        raise UnprovedError("draws random numbers that samples share, others in each micro-batch")
    return call.aligned(call.operands)


@rule(
    "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like "
    "empty_like scalar_tensor",
    numbers=True,
    partial=True,
    places=True,
)
def constant(call: Call) -> Value:
    """Fills a tensor with one number; along the batch each row gets it."""
    if is_symbolic(call.args.get("fill_value")) or is_symbolic(call.args.get("s")):
        raise UnprovedError("makes a value of the batch's size")
    if call.name.endswith("_like"):
        value = call.operand("self").value
        if value.kind is Kind.ROWS:
            return plain(value)
    return call.filled()


@rule("arange", numbers=True)
def arange(call: Call) -> Value:
    """Counts along the batch: positions of samples, or of lookups."""
    # exactly 0, 1, ... up to a number of rows: each entry is the position of its own row
    found = call.sizes.rows_of(call.args["end"])
    is_plain = call.args.get("start", 0) == 0 and call.args.get("step", 1) == 1
    if not is_plain or found is None or found[1] != 1 or call.outputs[0].is_floating_point():
        raise UnprovedError("counts along the batch")
    return Value(Kind.ROWS, rows=found[0], counted=found[0], is_own=True)


@rule("sum mean", linear=True)
def total(call: Call) -> Value:
    """Sums or averages: within a sample, or over the batch."""
    operand = call.only()
    value = operand.value
    if value.dim not in call.dims(operand):
        return plain(value)
    if call.name == "sum":
        return Value(Kind.SUM)
    # the mean's divisor must be the number of samples, whose shares are known
    if not call.sizes.are_same(SAMPLES, value.rows):
        raise UnprovedError(
            "averages over lookups, of which each part of a batch has another share; divide their "
            "sum by the number of samples"
        )
    return Value(Kind.MEAN)


@rule("select split split_with_sizes unsafe_split unsafe_split_with_sizes unbind", linear=True)
@rule(
    "softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax "
    "cummin sort argsort topk kthvalue median mode glu logsumexp amax amin max min argmax argmin "
    "any all prod var std var_mean std_mean linalg_vector_norm norm aminmax flip roll "
    "constant_pad_nd native_layer_norm _fused_rms_norm"
)
def along(call: Call) -> Value:
    """Computes along dims other than the batch's, with the same weights for all samples."""
    operand = call.only()
    dims = call.dims(operand)
    if call.name == "constant_pad_nd":  # a pair of numbers for each dim, from the last dim on
        padded = [place // 2 for place, by in enumerate(call.args["pad"]) if by != 0]
        dims = [operand.tensor.dim() - 1 - place for place in padded]
    elif "normalized_shape" in call.args:
        dims = list(range(operand.tensor.dim())[-len(call.args["normalized_shape"]) :])
    if operand.value.dim in dims or operand.name not in ("self", "input"):
        raise UnprovedError("computes over the batch: its samples change what others give")
    return plain(operand.value)


_FACTORS = {
    "mm": {"self": "mk", "mat2": "kn"},
    "addmm": {"mat1": "mk", "mat2": "kn"},
    "bmm": {"self": "bmk", "mat2": "bkn"},
    "baddbmm": {"batch1": "bmk", "batch2": "bkn"},
    "mv": {"self": "mk", "vec": "k"},
    "dot": {"self": "k", "tensor": "k"},
}
"""Arguments that are the factors, with their dims: b and m and n stay, k is summed over."""


@rule("mm addmm bmm baddbmm mv dot", partial=True)
def product(call: Call) -> Value | None:
    """Multiplies two tensors, and adds a constant in the add variants."""
    letters = _FACTORS[call.name]
    sides = [call.operand(name) for name in letters]
    is_added = call.name in ("addmm", "baddbmm")
    is_partial = any(operand.value.is_partial for operand in call.varying)
    if is_added and (is_partial or not call.operand("self").is_same):
        return None  # product and sum apart
    varying = [operand for operand in sides if not operand.is_same]
    if not varying:
        return SAME
    if is_partial:
        if len(varying) > 1:
            raise UnprovedError("multiplies means over samples, or sums")
        return Value(varying[0].value.kind)
    found = call.same_rows(varying)
    names = [letters[side.name][side.value.dim] for side in varying]
    # the batch may be k in both factors (a sum over it), b in both, or m or n in one
    if "k" in names:
        if is_added:
            return None
        if names != ["k", "k"]:
            raise UnprovedError("adds up over the batch")
        return Value(Kind.SUM)
    if len(varying) == 2 and names != ["b", "b"]:
        raise UnprovedError("puts every sample beside every other sample")
    if names == ["b"]:
        raise UnprovedError("has different constants for different places in the batch")
    return found


@rule(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_attention_math"
)
def attention(call: Call) -> list[Value]:
    """Computes attention within each sample: batch in dim 0 of queries, keys, values and mask."""
    inputs = [call.operand(name) for name in ("query", "key", "value")]
    masks = [operand for operand in call.operands if operand.name in ("attn_mask", "attn_bias")]
    if any(operand.is_same or operand.value.dim for operand in inputs):
        raise UnprovedError("attends over the batch, or has queries or keys that samples share")
    found = call.aligned([*inputs, *masks])
    # outputs without the batch are for the backward: a model does not read them
    hidden = Value(Kind.HIDDEN)
    return [found if call.sizes.batch_dims(out) else hidden for out in call.outputs]
