"""Operators that create tensors: a constant along the batch is the same for every sample."""

from __future__ import annotations

from torchrec_picasso.proof.call import Call, rule
from torchrec_picasso.proof.sizes import is_symbolic
from torchrec_picasso.proof.values import SAME, Kind, UnprovedError, Value

__all__: list[str] = []


@rule(
    "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like "
    "empty_like scalar_tensor"
)
def constant(call: Call) -> Value:
    """Fills a tensor with one number; along the batch each row gets it."""
    if is_symbolic(call.args.get("fill_value")) or is_symbolic(call.args.get("s")):
        raise UnprovedError("makes a value of the batch's size")
    for operand in call.varying:
        # zeros_like(x) has x's rows; of another tensor only the shape matters
        if operand.name == "self" and call.name.endswith("_like"):
            if operand.value.kind is Kind.ROWS:
                return Value(Kind.ROWS, rows=operand.value.rows, outer=operand.value.outer)
            if not operand.value.is_partial:
                raise UnprovedError(f"has the shape of {operand.value.kind.value}")
    (out,) = call.outputs
    dims = call.sizes.batch_dims(out)
    if not dims:
        return SAME
    found = call.sizes.rows_of(out.shape[dims[0]])
    if found is None:
        raise UnprovedError(f"makes a tensor of {out.shape[dims[0]]} entries, which is no batch")
    return Value(Kind.ROWS, rows=found[0])


@rule("arange")
def arange(call: Call) -> Value:
    """Counts along the batch: positions of samples, or of lookups."""
    if not call.numbers:
        return SAME
    end, is_from_0 = call.args["end"], call.args.get("start", 0) == 0
    # exactly 0, 1, ... up to a number of rows: each entry is the position of its own row
    found = call.sizes.rows_of(end)
    if not is_from_0 or call.args.get("step", 1) != 1 or found is None or found[1] != 1:
        raise UnprovedError("counts along the batch")
    if call.outputs[0].is_floating_point():
        raise UnprovedError("counts along the batch in fractions")
    return Value(Kind.ROWS, rows=found[0], counted=found[0], is_own=True)
