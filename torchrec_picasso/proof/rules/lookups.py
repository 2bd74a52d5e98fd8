"""Entries by index: from tables, within a sample, or a sample's for each of its lookups."""

from __future__ import annotations

from dataclasses import replace

from torchrec_picasso.proof.call import Call, Operand, rule
from torchrec_picasso.proof.values import SAME, Kind, Unproved, Value, plain

__all__: list[str] = []


@rule("embedding")
def embedding(call: Call) -> Value:
    """Rows of a table."""
    return _of_table(call, call.of("weight"), [call.of("indices")])


def _of_table(call: Call, table: Operand, indices: list[Operand]) -> Value:
    call.refuse_numbers()
    if not table.is_same:
        raise Unproved("looks up in a table that depends on the batch")
    if any(index.value.counted for index in indices):
        raise Unproved("looks up by places in the batch")
    (first, *others) = indices
    if first.value.kind is Kind.LOOKUPS and not others:
        return first.value
    return call.aligned(indices)


@rule("index_select")
def index_select(call: Call) -> Value:
    """Places of one dim."""
    call.refuse_numbers()
    operand, index = call.of("self"), call.of("index")
    dim = call.args["dim"] % max(operand.tensor.dim(), 1)
    if operand.is_same:
        return _of_table(call, operand, [index])
    if operand.value.is_partial:
        if not index.is_same:
            raise Unproved(f"looks up in {operand.value.kind.value}")
        return operand.value
    if operand.value.kind is not Kind.ROWS:
        raise Unproved(f"looks up in {operand.value.kind.value}")
    if dim != operand.value.dim:
        if not index.is_same:
            raise Unproved("puts every sample beside every other sample")
        return replace(operand.value, features=())
    _require_own(call, operand, index)
    return Value(
        Kind.ROWS,
        rows=index.value.rows,
        counted=operand.value.counted,
        is_own=operand.value.is_own,
    )


def _require_own(call: Call, operand: Operand, index: Operand) -> None:
    """An index into the batch must be that of each entry's own row."""
    value = index.value
    if value.kind is not Kind.ROWS or not value.is_own:
        raise Unproved("takes entries of other samples, by an index into the batch")
    if operand.value.outer != 1 or value.outer != 1:
        raise Unproved("takes samples in different orders")
    if call.sizes.inner(operand.tensor, operand.value) != 1:
        raise Unproved("takes entries of different samples for those of one")
    call.sizes.want_same(value.counted, operand.value.rows, call.where)


@rule("index _unsafe_index")
def index(call: Call) -> Value:
    """Places of several dims."""
    call.refuse_numbers()
    operand = call.of("self")
    given = call.args["indices"]
    indices = [other for other in call.operands if other.name == "indices"]
    by_dim = dict(zip((dim for dim, of in enumerate(given) if of is not None), indices))
    if any(str(other.tensor.dtype) in ("torch.bool", "torch.uint8") for other in indices):
        raise Unproved("takes the entries that fulfil a condition")
    if operand.is_same:
        return _of_table(call, operand, indices)
    if operand.value.is_partial:
        if any(not other.is_same for other in indices):
            raise Unproved(f"looks up in {operand.value.kind.value}")
        return operand.value
    if operand.value.kind is not Kind.ROWS:
        raise Unproved(f"looks up in {operand.value.kind.value}")
    own = by_dim.pop(operand.value.dim, None)
    if any(other.value.counted for other in by_dim.values()):
        raise Unproved("looks up by places in the batch")
    if own is None:
        if any(not other.is_same for other in by_dim.values()):
            raise Unproved("puts every sample beside every other sample")
        return replace(operand.value, features=())
    _require_own(call, operand, own)
    found = call.aligned(indices)
    return replace(found, counted=operand.value.counted, is_own=operand.value.is_own)


@rule("gather scatter scatter_add scatter_reduce")
def gather(call: Call) -> Value:
    """Places of one dim, others for each sample."""
    call.refuse_numbers()
    if not call.varying:
        return SAME
    if any(operand.is_same or operand.value.kind is not Kind.ROWS for operand in call.operands):
        raise Unproved("takes entries by an index that is not one of each sample")
    found = call.same_rows(call.operands)
    (batch_dim, *others) = {operand.value.dim for operand in call.operands}
    operand = call.of("self")
    if others or call.args["dim"] % operand.tensor.dim() == batch_dim:
        raise Unproved("takes entries of other samples, by an index into the batch")
    if len({call.sizes.inner(other.tensor, other.value) for other in call.operands}) > 1:
        raise Unproved("takes entries of different samples for those of one")
    if any(other.value.counted for other in call.operands):
        raise Unproved("computes with places in the batch")
    return plain(found)


@rule("index_add")
def index_add(call: Call) -> Value:
    """Each row added to the sample that it belongs to."""
    call.refuse_numbers()
    operand, index, source = call.of("self"), call.of("index"), call.of("source")
    dim = call.args["dim"] % max(operand.tensor.dim(), 1)
    if not call.varying:
        return SAME
    if operand.value.kind is not Kind.ROWS or source.value.kind is not Kind.ROWS:
        raise Unproved("adds entries of samples to what are none")
    if operand.value.counted or source.value.counted:
        raise Unproved("computes with places in the batch")
    if dim != operand.value.dim:
        if not index.is_same or source.value.dim != operand.value.dim:
            raise Unproved("adds entries to those of other samples")
        return call.same_rows([operand, source])
    _require_own(call, operand, index)
    if source.value.dim != dim or source.value.outer != 1:
        raise Unproved("adds entries to those of other samples")
    if call.sizes.inner(source.tensor, source.value) != 1:
        raise Unproved("takes entries of different samples for those of one")
    call.sizes.want_same(source.value.rows, index.value.rows, call.where)
    return plain(operand.value)


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Value:
    """The place of a sample, for each of its lookups."""
    repeats = call.of("repeats")
    value = repeats.value
    if value.kind is not Kind.ROWS or len(value.features) != 1 or repeats.tensor.dim() != 1:
        raise Unproved("repeats samples by numbers that are not the lengths of a feature")
    (feature,) = value.features
    if call.sizes.times(call.outputs[0].shape[0], feature) != 1:
        raise Unproved("repeats samples to another number than that of the feature's lookups")
    return Value(Kind.ROWS, rows=feature, counted=value.rows, is_own=True)
