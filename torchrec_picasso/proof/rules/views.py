"""Operators that keep entries and change the shape, or select some entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from torchrec_picasso.proof.call import Call, Operand, rule
from torchrec_picasso.proof.values import SAME, SAMPLES, Kind, UnprovedError, Value, plain

__all__: list[str] = []


def _only(call: Call) -> Operand:
    """Returns the one operand that depends on the batch."""
    (operand, *others) = call.varying or call.operands
    if others:
        raise UnprovedError("takes a place from a tensor that depends on the batch")
    return operand


def _kept(value: Value) -> Value:
    """Keeps entries but not the features of rows, whose order may be another one now."""
    return replace(value, features=()) if value.kind is Kind.ROWS else value


@rule("view _unsafe_view reshape _reshape_alias")
def view(call: Call) -> Value:
    """Reshapes; the batch must stay between the same neighbours in memory."""
    operand = _only(call)
    value, tensor, (out,) = operand.value, operand.tensor, call.outputs
    if operand.is_same or value.is_partial:
        call.refuse_numbers()
        return value
    if tuple(map(str, out.shape)) == tuple(map(str, tensor.shape)):
        return value
    if value.kind is not Kind.ROWS:
        raise UnprovedError(f"gives {value.kind.value} another shape")
    dims = call.sizes.batch_dims(out)
    times = call.sizes.times(out.shape[dims[0]], value.rows) if len(dims) == 1 else None
    if times is None:
        raise UnprovedError("splits the batch, or multiplies it: sizes other than the batch's meet")
    (dim,) = dims
    if value.rows != SAMPLES and -1 in call.args["size"] and call.args["size"][dim] != -1:
        raise UnprovedError("infers a size from lookups, which may be none")
    # entries before the batch: outer blocks times the dims in front; they must stay whole blocks
    before = prod(tensor.shape[: value.dim]) * value.outer
    outer, rest = divmod(before, prod(out.shape[:dim]) or 1)
    if rest or not outer or times % outer:
        raise UnprovedError("takes entries of different samples for those of one")
    found = replace(value, outer=outer)
    num_features = len(value.features)
    fits = outer == num_features or (outer == 1 and dim == 1 and out.shape[0] == num_features)
    return found if fits and out.dim() <= 2 else _kept(found)


@rule("permute transpose t unsqueeze movedim swapaxes numpy_T adjoint mT")
def turned(call: Call) -> Value:
    """Reorders dims."""
    call.refuse_numbers()
    operand = _only(call)
    if operand.value.kind in (Kind.OFFSETS, Kind.LOOKUPS):
        raise UnprovedError(f"turns {operand.value.kind.value}")
    return _kept(operand.value)


@rule("squeeze")
def squeeze(call: Call) -> Value:
    """Drops dims of one entry; the batch's dim would be dropped if there is one sample."""
    operand = _only(call)
    if operand.is_same or operand.value.is_partial:
        return operand.value
    dims = call.dims(operand)
    if dims is None or operand.value.dim in dims:
        raise UnprovedError("drops the batch's dim where there is one sample; name another dim")
    return _kept(operand.value)


@rule("expand")
def expand(call: Call) -> Value:
    """Repeats entries along new dims, or along dims of one entry."""
    operand = _only(call)
    value, (out,) = operand.value, call.outputs
    if operand.is_same:
        return _repeated_constant(call, out)
    if value.kind not in (Kind.ROWS, Kind.MEAN, Kind.SUM):
        raise UnprovedError(f"repeats {value.kind.value}")
    if value.is_partial and call.numbers:
        raise UnprovedError(f"puts {value.kind.value} beside every sample")
    return _kept(value)


@rule("repeat")
def repeat(call: Call) -> Value:
    """Repeats entries along dims."""
    operand = _only(call)
    if operand.is_same:
        return _repeated_constant(call, call.outputs[0])
    call.refuse_numbers()
    repeats: Sequence[int] = call.args["repeats"]
    if operand.value.kind is Kind.ROWS and repeats[operand.place] != 1:
        raise UnprovedError("repeats the batch")
    if operand.value.kind in (Kind.OFFSETS, Kind.LOOKUPS):
        raise UnprovedError(f"repeats {operand.value.kind.value}")
    return _kept(operand.value)


def _repeated_constant(call: Call, out: torch.Tensor) -> Value:
    """Repeats a constant; along the batch each row gets it."""
    dims = call.sizes.batch_dims(out)
    if not dims:
        call.refuse_numbers()
        return SAME
    found = call.sizes.rows_of(out.shape[dims[0]])
    if found is None:
        raise UnprovedError(f"repeats a constant {out.shape[dims[0]]} times, which is no batch")
    return Value(Kind.ROWS, rows=found[0])


@rule("select")
def select(call: Call) -> Value:
    """Selects one index of a dim."""
    operand = _only(call)
    dims = call.dims(operand) or [0]
    call.refuse_numbers()
    value = operand.value
    if value.kind is Kind.LOOKUPS and dims == [value.dim]:
        raise UnprovedError("takes one lookup of the batch")
    if value.kind in (Kind.ROWS, Kind.OFFSETS) and dims == [value.dim]:
        raise UnprovedError("takes one place of the batch")
    if value.kind is Kind.OFFSETS:
        raise UnprovedError(f"takes a part of {value.kind.value}")
    # lengths (F, B): the index selects a feature
    if value.features and value.dim == 1 and dims == [0]:
        return replace(value, features=(value.features[call.args["index"]],))
    return _kept(value)


@rule("slice narrow")
def slice_(call: Call) -> Value:
    """Selects consecutive indices of a dim."""
    operand = _only(call)
    value, (out,) = operand.value, call.outputs
    dim = call.args.get("dim", 0) % max(operand.tensor.dim(), 1)
    if operand.is_same or value.is_partial or dim != value.dim:
        call.refuse_numbers()
        return _kept(value)
    start, step = call.args.get("start") or 0, call.args.get("step", 1)
    if step == 1 and str(out.shape[dim]) == str(operand.tensor.shape[dim]):
        return value
    if step == 1:
        found = _slice_of_features(call, value, start, out.shape[dim])
        if found is not None:
            return found
    raise UnprovedError("takes some places of the batch and leaves others")


def _slice_of_features(call: Call, value: Value, start: Any, size: Any) -> Value | None:
    """Recognizes parts of the batch's dim: features, or all offsets but the last or the first."""
    sizes, features = call.sizes, value.features
    if value.kind is Kind.OFFSETS and len(features) == 1:
        is_known = sizes.is_sum(start, []) or sizes.is_sum(start - 1, [])
        if is_known and sizes.times(size, SAMPLES) == 1:
            return Value(Kind.ROWS, rows=SAMPLES, counted=features[0])
    is_packed = value.kind is Kind.LOOKUPS
    if not is_packed and not (features and value.outer == len(features)):
        return None
    # a range of features: it starts after the lookups (or samples) of those before
    for first in range(len(features)):
        for end in range(first + 1, len(features) + 1):
            rows = features[:first], features[first:end]
            before, within = rows if is_packed else tuple([SAMPLES] * len(part) for part in rows)
            if sizes.is_sum(start, before) and sizes.is_sum(size, within):
                return _of_features(value, features[first:end])
    return None


def _of_features(value: Value, features: tuple[str, ...]) -> Value:
    """Makes the value of a range of features; of a single one, its lookups are rows."""
    if value.kind is Kind.LOOKUPS and len(features) == 1:
        return Value(Kind.ROWS, rows=features[0])
    outer = value.outer if value.kind is Kind.LOOKUPS else len(features)
    return replace(value, outer=outer, features=features)


@rule("split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unbind")
def split(call: Call) -> Value | list[Value]:
    """Splits a dim into parts."""
    operand = _only(call)
    value, outs = operand.value, call.outputs
    dim = call.args.get("dim", 0) % max(operand.tensor.dim(), 1)
    if operand.is_same or value.is_partial:
        call.refuse_numbers()
        return value
    if value.kind is Kind.ROWS and dim != value.dim:
        call.refuse_numbers()
        if call.name == "unbind" and value.dim == 1 and len(value.features) == len(outs):
            return [replace(value, features=(feature,)) for feature in value.features]
        return _kept(value)
    sizes = [out.shape[dim] for out in outs] if call.name != "unbind" else []
    # along the batch each part must be known: a feature, or offsets
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    found = [_slice_of_features(call, value, start, end - start) for start, end in pairwise(starts)]
    known = [part for part in found if part is not None]
    if len(known) != len(outs):
        raise UnprovedError("cuts the batch")
    return known


@rule("cat stack")
def cat(call: Call) -> Value:
    """Concatenates or stacks tensors; the operator fails if their rows differ in number."""
    tensors, varying = call.operands, call.varying
    call.refuse_numbers()
    if not varying:
        return SAME
    kinds = {operand.value.kind for operand in tensors}
    if kinds <= {Kind.SAME, Kind.MEAN} or kinds == {Kind.SUM}:
        return Value(varying[0].value.kind)
    if kinds != {Kind.ROWS}:
        raise UnprovedError("puts entries of samples beside what are none")
    found = call.same_rows(varying)
    (dim, *others) = {operand.value.dim for operand in varying}
    given = call.args.get("dim", 0)
    is_along = call.name == "cat" and given % call.outputs[0].dim() == dim
    if others or is_along:
        raise UnprovedError("puts samples behind samples")
    for operand in varying:
        call.sizes.fail_unless_same(found.rows, operand.value.rows)
    if any(operand.value.counted for operand in varying):
        raise UnprovedError("puts places in the batch beside other numbers")
    return plain(found)


@rule("diagonal unfold flip roll constant_pad_nd tril triu")
def within(call: Call) -> Value:
    """Reorders or selects entries within a sample."""
    operand = _only(call)
    call.refuse_numbers()
    value = operand.value
    if operand.is_same:
        return value
    if value.kind is not Kind.ROWS:
        raise UnprovedError(f"moves entries of {value.kind.value}")
    num_dims = operand.tensor.dim()
    # dims along which entries move; the batch's must not be among them
    if call.name == "diagonal":
        touched = [call.args["dim1"] % num_dims, call.args["dim2"] % num_dims]
    elif call.name in ("tril", "triu"):
        touched = [num_dims - 2, num_dims - 1]
    elif call.name == "constant_pad_nd":
        pad = call.args["pad"]
        touched = [num_dims - 1 - place // 2 for place, by in enumerate(pad) if by != 0]
    else:
        name = {"unfold": "dimension"}.get(call.name, "dims")
        dims = call.dims(operand, name)
        touched = list(range(num_dims)) if dims is None else dims
    if value.dim in touched:
        raise UnprovedError("moves samples, or mixes neighbours")
    if value.counted and call.name == "constant_pad_nd":
        raise UnprovedError("computes with places in the batch")
    return _kept(value)
