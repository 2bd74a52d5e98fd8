"""Batched products of matrices, convolutions, attention and layers."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_picasso.proof.call import Call, Operand, rule
from torchrec_picasso.proof.values import SAME, Kind, UnprovedError, Value

__all__: list[str] = []

_DIMS = {"mm": ("mk", "kn"), "bmm": ("bmk", "bkn"), "mv": ("mk", "k"), "dot": ("k", "k")}
"""Dims of both factors: b and m and n stay, k is summed over."""
_SIDES = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
    "dot": ("self", "tensor"),
}
"""Names of the arguments that are the factors."""


@rule("mm addmm bmm baddbmm mv addmv dot")
def product(call: Call) -> Value:
    """Multiplies two tensors, and adds a third one in the add variants."""
    call.refuse_numbers()
    sides = [call.of(name) for name in _SIDES[call.name]]
    added = call.find("self") if call.name in ("addmm", "baddbmm", "addmv") else None
    found = _product(call, sides, _DIMS[call.name.removeprefix("add").replace("badd", "")])
    if added is None or (added.is_same and found.kind is not Kind.SUM):
        return found
    # rows + rows, mean + constant or mean, sum + sum; other combinations are refused
    if found.kind is Kind.ROWS and added.value.kind is Kind.ROWS:
        return _added(call, added, found)
    if {found.kind, added.value.kind} <= {Kind.SAME, Kind.MEAN}:
        return Value(Kind.MEAN)
    if found.kind is added.value.kind is Kind.SUM:
        return found
    raise UnprovedError(f"adds {added.value.kind.value} to a product")


def _added(call: Call, added: Operand, found: Value) -> Value:
    """Adds rows to a product of rows, if their batch dims coincide."""
    out = call.sizes.locate(call.outputs[0], found)
    if added.place != out.dim - call.outputs[0].dim():
        raise UnprovedError("puts every sample beside every other sample")
    rows = call.same_rows([added])
    if rows.outer != found.outer or added.value.counted:
        raise UnprovedError("takes samples in different orders")
    call.sizes.want_same(rows.rows, found.rows, call.where)
    return found


def _product(call: Call, sides: Sequence[Operand], letters: Sequence[str]) -> Value:
    """Derives the value of a product from the dims where its factors have the batch."""
    varying = [operand for operand in sides if not operand.is_same]
    if not varying:
        return SAME
    if any(operand.value.is_partial for operand in varying):
        if len(varying) > 1:
            raise UnprovedError("multiplies means over samples, or sums")
        return Value(varying[0].value.kind)
    if any(operand.value.counted for operand in varying):
        raise UnprovedError("computes with places in the batch")
    found = call.same_rows(varying)
    names = [dims[side.value.dim] for side, dims in zip(sides, letters) if not side.is_same]
    # the batch may be k in both factors (a sum over it), b in both, or m or n in one
    if "k" in names:
        if names != ["k", "k"]:
            raise UnprovedError("adds up over the batch")
        return Value(Kind.SUM)
    if len(varying) == 2 and names != ["b", "b"]:
        raise UnprovedError("puts every sample beside every other sample")
    if names == ["b"]:
        raise UnprovedError("has different constants for different places in the batch")
    return found


@rule("convolution _convolution")
def convolution(call: Call) -> Value:
    """Convolves samples in dim 0, with the same weights for all."""
    return _first_dim(call, call.of("input"))


@rule("native_layer_norm native_group_norm _fused_rms_norm")
def norm(call: Call) -> Value:
    """Normalizes over dims of each sample."""
    operand = call.of("input")
    width = len(call.args["normalized_shape"]) if "normalized_shape" in call.args else None
    if call.name == "native_group_norm":
        return _first_dim(call, operand)
    first = operand.tensor.dim() - (width or 0)
    if operand.value.kind is Kind.ROWS and operand.value.dim >= first:
        raise UnprovedError("takes a norm over the batch")
    return _of_one(call, operand)


@rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm "
    "batch_norm_with_update _batch_norm_with_update batch_norm_stats"
)
def batch_norm(call: Call) -> Value:
    """Refuses statistics of the batch."""
    raise UnprovedError("takes statistics of the batch, others in a micro-batch; use LayerNorm")


@rule("max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d avg_pool1d max_pool1d_with_indices")
def pool(call: Call) -> Value:
    """Pools windows over the last dims."""
    operand = call.of("self")
    spatial = 1 if "1d" in call.name else 2
    if operand.value.kind is Kind.ROWS and operand.value.dim >= operand.tensor.dim() - spatial:
        raise UnprovedError("pools over the batch")
    return _of_one(call, operand)


@rule("mkldnn_rnn_layer")
def recurrent(call: Call) -> list[Value]:
    """Runs a recurrent layer over the steps of each sample."""
    call.refuse_numbers()
    operand = call.of("input")
    batch_dim = 0 if call.args["batch_first"] else 1
    for other in call.varying:
        if other.value.kind is not Kind.ROWS or other.value.counted:
            raise UnprovedError(f"reads {other.value.kind.value}")
        if other is not operand and other.value.dim != other.tensor.dim() - 2:
            raise UnprovedError("has states that are not those of its samples")
    if operand.is_same or operand.value.dim != batch_dim or call.args["batch_sizes"]:
        raise UnprovedError("runs over the batch as if over steps")
    return call.with_scratch(call.same_rows(call.varying))


@rule(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_attention_math"
)
def attention(call: Call) -> list[Value]:
    """Computes attention within each sample."""
    call.refuse_numbers()
    inputs = [call.of(name) for name in ("query", "key", "value")]
    mask = call.find("attn_mask") or call.find("attn_bias")
    if any(operand.value.kind is not Kind.ROWS or operand.value.dim for operand in inputs):
        raise UnprovedError("attends over the batch, or has queries or keys that samples share")
    if any(operand.value.counted for operand in inputs):
        raise UnprovedError("computes with places in the batch")
    found = call.same_rows(inputs)
    if mask is not None:
        if not mask.is_same and (mask.value.dim or mask.tensor.dim() < 4):
            raise UnprovedError("masks other samples")
        found = call.aligned([inputs[0], mask]) if mask.tensor.dim() == 4 else found
    return call.with_scratch(found)


def _first_dim(call: Call, operand: Operand) -> Value:
    """Requires the batch in dim 0; all else is the same for every batch."""
    if operand.value.kind is Kind.ROWS and operand.value.dim:
        raise UnprovedError("takes samples for channels")
    return _of_one(call, operand, may_have_numbers=call.name == "native_group_norm")


def _of_one(call: Call, operand: Operand, may_have_numbers: bool = False) -> Value:
    """Maps each sample by itself; all other operands are the same for every batch."""
    if not may_have_numbers:
        call.refuse_numbers()
    if operand.is_same and not call.varying:
        return SAME
    if call.varying != [operand] or operand.value.kind is not Kind.ROWS or operand.value.counted:
        raise UnprovedError("has weights that depend on the batch, or reads what are no samples")
    return Value(Kind.ROWS, rows=operand.value.rows, outer=operand.value.outer)
