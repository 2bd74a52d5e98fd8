"""Reductions along dims: any within a sample, only sums and means over the batch."""

from __future__ import annotations

from torchrec_picasso.proof.call import Call, rule
from torchrec_picasso.proof.values import SAME, SAMPLES, Kind, UnprovedError, Value

__all__: list[str] = []


@rule("sum mean")
def total(call: Call) -> Value:
    """Sums or averages; a mean or sum over samples stays one."""
    (operand,) = call.operands
    value = operand.value
    call.refuse_numbers()
    if operand.is_same or value.is_partial:
        return value
    if value.kind is not Kind.ROWS or value.counted:
        raise UnprovedError(f"adds up {value.kind.value}, or places in the batch")
    dims = call.dims(operand)
    if dims is not None and value.dim not in dims:
        return Value(Kind.ROWS, rows=value.rows, outer=value.outer)
    if call.name == "sum":
        return Value(Kind.SUM)
    # the mean's divisor must be the number of samples, whose shares are known
    if value.rows != SAMPLES and not call.sizes.are_same(SAMPLES, value.rows):
        raise UnprovedError(
            "averages over lookups, of which each part of a batch has another share; divide their "
            "sum by the number of samples"
        )
    return Value(Kind.MEAN)


@rule(
    "softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax "
    "cummin sort argsort topk kthvalue median nanmedian mode glu logsumexp amax amin max min "
    "argmax argmin any all prod var std var_mean std_mean linalg_vector_norm norm aminmax "
    "count_nonzero nansum"
)
def along(call: Call) -> Value:
    """Computes along dims other than the batch's."""
    (operand, *others) = call.operands
    value = operand.value
    call.refuse_numbers()
    if others and call.is_pointwise is False:
        raise UnprovedError("takes several tensors")
    if operand.is_same:
        return SAME
    if value.is_partial:
        raise UnprovedError(f"is not linear in {value.kind.value}")
    if value.kind is not Kind.ROWS or value.counted:
        raise UnprovedError(f"computes with {value.kind.value}, or with places in the batch")
    default = -1 if call.name in ("sort", "argsort", "topk", "kthvalue", "mode", "glu") else None
    # these operators have -1 as default dim, the others reduce all dims
    if "dim" not in call.args and default is None:
        dims = None
    else:
        call.args.setdefault("dim", default)
        dims = call.dims(operand)
    if dims is None or value.dim in dims:
        raise UnprovedError("computes over the batch: its samples change what others give")
    return Value(Kind.ROWS, rows=value.rows, outer=value.outer)
