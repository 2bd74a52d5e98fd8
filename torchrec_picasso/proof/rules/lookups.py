"""Operators with indices: into tables, within a sample, or from a sample to its lookups."""

from __future__ import annotations

from dataclasses import replace

from torchrec_picasso.proof.call import Call, Operand, rule
from torchrec_picasso.proof.values import SAME, Kind, UnprovedError, Value, plain

__all__: list[str] = []


@rule("embedding")
def embedding(call: Call) -> Value:
    """Looks up rows of a table."""
    if call.args["scale_grad_by_freq"]:
        raise UnprovedError("scales gradients by how often the batch has an index")
    return _of_table(call, call.of("weight"), [call.of("indices")])


def _of_table(call: Call, table: Operand, indices: list[Operand]) -> Value:
    """Looks up in a tensor that is the same for every batch: rows of the indices."""
    call.refuse_numbers()
    if not table.is_same:
        raise UnprovedError("looks up in a table that depends on the batch")
    if any(index.value.counted for index in indices):
        raise UnprovedError("looks up by places in the batch")
    (first, *others) = indices
    if first.value.kind is Kind.LOOKUPS and not others:
        return first.value
    return call.aligned(indices)


@rule("index_select")
def index_select(call: Call) -> Value:
    """Selects entries of one dim."""
    call.refuse_numbers()
    operand, index = call.of("self"), call.of("index")
    dim = call.args["dim"] % max(operand.tensor.dim(), 1)
    if operand.is_same:
        return _of_table(call, operand, [index])
    if operand.value.is_partial:
        if not index.is_same:
            raise UnprovedError(f"looks up in {operand.value.kind.value}")
        return operand.value
    if operand.value.kind is not Kind.ROWS:
        raise UnprovedError(f"looks up in {operand.value.kind.value}")
    # along another dim each sample is treated alike; along the batch the index must be its own row
    if dim != operand.value.dim:
        if not index.is_same:
            raise UnprovedError("puts every sample beside every other sample")
        return replace(operand.value, features=())
    _require_own(call, operand, index)
    return Value(
        Kind.ROWS,
        rows=index.value.rows,
        counted=operand.value.counted,
        is_own=operand.value.is_own,
    )


def _require_own(call: Call, operand: Operand, index: Operand) -> None:
    """Requires an index into the batch to be the position of each entry's own row."""
    value = index.value
    if value.kind is not Kind.ROWS or not value.is_own:
        raise UnprovedError("takes entries of other samples, by an index into the batch")
    if operand.value.outer != 1 or value.outer != 1:
        raise UnprovedError("takes samples in different orders")
    if call.sizes.inner(operand.tensor, operand.value) != 1:
        raise UnprovedError("takes entries of different samples for those of one")
    call.sizes.want_same(value.counted, operand.value.rows, call.where)


@rule("index _unsafe_index")
def index(call: Call) -> Value:
    """Selects entries by indices of several dims."""
    call.refuse_numbers()
    operand = call.of("self")
    given = call.args["indices"]
    indices = [other for other in call.operands if other.name == "indices"]
    by_dim = dict(zip((dim for dim, one in enumerate(given) if one is not None), indices))
    if any(str(other.tensor.dtype) in ("torch.bool", "torch.uint8") for other in indices):
        raise UnprovedError("takes the entries that fulfil a condition")
    if operand.is_same:
        return _of_table(call, operand, indices)
    if operand.value.is_partial:
        if any(not other.is_same for other in indices):
            raise UnprovedError(f"looks up in {operand.value.kind.value}")
        return operand.value
    if operand.value.kind is not Kind.ROWS:
        raise UnprovedError(f"looks up in {operand.value.kind.value}")
    # as in index_select: the index of the batch's dim must be each entry's own row
    own = by_dim.pop(operand.value.dim, None)
    if any(other.value.counted for other in by_dim.values()):
        raise UnprovedError("looks up by places in the batch")
    if own is None:
        if any(not other.is_same for other in by_dim.values()):
            raise UnprovedError("puts every sample beside every other sample")
        return replace(operand.value, features=())
    _require_own(call, operand, own)
    found = call.aligned(indices)
    return replace(found, counted=operand.value.counted, is_own=operand.value.is_own)


@rule("gather scatter scatter_add scatter_reduce")
def gather(call: Call) -> Value:
    """Selects or writes entries of one dim, with other indices for each sample."""
    call.refuse_numbers()
    if not call.varying:
        return SAME
    if any(operand.is_same or operand.value.kind is not Kind.ROWS for operand in call.operands):
        raise UnprovedError("takes entries by an index that is not one of each sample")
    # all operands have the batch in one dim, and the index works along another one
    found = call.same_rows(call.operands)
    (batch_dim, *others) = {operand.value.dim for operand in call.operands}
    operand = call.of("self")
    if others or call.args["dim"] % operand.tensor.dim() == batch_dim:
        raise UnprovedError("takes entries of other samples, by an index into the batch")
    if len({call.sizes.inner(other.tensor, other.value) for other in call.operands}) > 1:
        raise UnprovedError("takes entries of different samples for those of one")
    if any(other.value.counted for other in call.operands):
        raise UnprovedError("computes with places in the batch")
    return plain(found)


@rule("index_add")
def index_add(call: Call) -> Value:
    """Adds each row to the sample that it belongs to."""
    call.refuse_numbers()
    operand, index, source = call.of("self"), call.of("index"), call.of("source")
    dim = call.args["dim"] % max(operand.tensor.dim(), 1)
    if not call.varying:
        return SAME
    if operand.value.kind is not Kind.ROWS or source.value.kind is not Kind.ROWS:
        raise UnprovedError("adds entries of samples to what are none")
    if operand.value.counted or source.value.counted:
        raise UnprovedError("computes with places in the batch")
    if dim != operand.value.dim:
        if not index.is_same or source.value.dim != operand.value.dim:
            raise UnprovedError("adds entries to those of other samples")
        return call.same_rows([operand, source])
    # along the batch: a sum of each sample's lookups, such as pooling by hand
    _require_own(call, operand, index)
    if source.value.dim != dim or source.value.outer != 1:
        raise UnprovedError("adds entries to those of other samples")
    if call.sizes.inner(source.tensor, source.value) != 1:
        raise UnprovedError("takes entries of different samples for those of one")
    call.sizes.want_same(source.value.rows, index.value.rows, call.where)
    return plain(operand.value)


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Value:
    """Repeats the position of each sample for its lookups."""
    repeats = call.of("repeats")
    value = repeats.value
    if value.kind is not Kind.ROWS or len(value.features) != 1 or repeats.tensor.dim() != 1:
        raise UnprovedError("repeats samples by numbers that are not the lengths of a feature")
    (feature,) = value.features
    if call.sizes.times(call.outputs[0].shape[0], feature) != 1:
        raise UnprovedError("repeats samples to another number than that of the feature's lookups")
    return Value(Kind.ROWS, rows=feature, counted=value.rows, is_own=True)
