"""FBGEMM's operators on jagged tensors and pooled columns, as TorchRec's modules call them."""

from __future__ import annotations

from torchrec_picasso.proof.call import Call, Operand, rule
from torchrec_picasso.proof.values import SAMPLES, Kind, UnprovedError, Value

__all__: list[str] = []


@rule("fbgemm.asynchronous_complete_cumsum")
def offsets(call: Call) -> Value:
    """Computes offsets from lengths: the first lookup of each sample."""
    (lengths,) = call.operands
    value = lengths.value
    if value.kind is not Kind.ROWS or len(value.features) != 1 or lengths.tensor.dim() != 1:
        raise UnprovedError("adds up along the batch")
    return Value(Kind.OFFSETS, rows=value.rows, features=value.features)


def _feature(offsets: Operand) -> str:
    """Returns the one feature whose offsets these are."""
    if offsets.value.kind is not Kind.OFFSETS or len(offsets.value.features) != 1:
        raise UnprovedError("has offsets that are not those of one feature")
    return offsets.value.features[0]


@rule(
    "fbgemm.jagged_2d_to_dense fbgemm.jagged_1d_to_dense fbgemm.jagged_to_padded_dense "
    "fbgemm.jagged_to_padded_dense_forward fbgemm.stacked_jagged_2d_to_dense"
)
def to_dense(call: Call) -> Value:
    """Pads each sample's lookups to rows of equal length, ``(n, D)`` -> ``(B, L, D)``."""
    call.refuse_numbers()
    values, (places, *others) = (
        call.of("values"),
        [operand for operand in call.operands if operand.name in ("offsets", "offset")],
    )
    feature = _feature(places)
    if others or values.value.kind is not Kind.ROWS or values.value.dim or values.value.counted:
        raise UnprovedError("pads values of another form than one row per lookup")
    if values.value.outer != 1 or call.sizes.inner(values.tensor, values.value) != 1:
        raise UnprovedError("pads values of another form than one row per lookup")
    # values and offsets must belong to the same lookups
    call.sizes.want_same(values.value.rows, feature, call.where)
    return Value(Kind.ROWS, rows=places.value.rows)


@rule("fbgemm.dense_to_jagged fbgemm.dense_to_jagged_forward")
def to_jagged(call: Call) -> list[Value]:
    """Removes the padding: entries of each sample up to its length, ``(B, L, D)`` -> ``(n, D)``."""
    dense, (places, *others) = (
        call.of("dense"),
        [operand for operand in call.operands if operand.name in ("offsets", "x_offsets")],
    )
    feature = _feature(places)
    value = dense.value
    if others or value.kind is not Kind.ROWS or value.dim or value.counted or value.outer != 1:
        raise UnprovedError("takes places of what is not one list per sample")
    if call.sizes.inner(dense.tensor, value) != 1:
        raise UnprovedError("takes entries of different samples for those of one")
    if call.sizes.times(call.outputs[0].shape[0], feature) != 1:
        raise UnprovedError("gives another number of rows than the feature has lookups")
    call.sizes.want_same(value.rows, SAMPLES, call.where)
    return [Value(Kind.ROWS, rows=feature), *(places.value for _ in call.outputs[1:])]


@rule(
    "fbgemm.permute_multi_embedding fbgemm.permute_multi_embedding_function "
    "fbgemm.regroup_keyed_tensor fbgemm.permute_pooled_embs_auto_grad fbgemm.permute_pooled_embs"
)
def regroup(call: Call) -> Value:
    """Reorders columns of pooled tensors ``(B, sum of D)``."""
    call.refuse_numbers()
    varying = call.varying
    if any(operand.value.kind is not Kind.ROWS or operand.value.dim for operand in varying):
        raise UnprovedError("regroups what is not one row per sample")
    if any(operand.value.counted for operand in varying):
        raise UnprovedError("computes with places in the batch")
    pooled = [op for op in call.operands if op.name in ("pooled_embs", "embs", "keyed_tensors")]
    if any(operand.is_same for operand in pooled):
        raise UnprovedError("regroups columns that samples share")
    return call.same_rows(varying)
