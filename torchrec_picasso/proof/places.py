"""Rules for operators that move entries: views, indices, jagged tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from torchrec_picasso.proof.call import Call, Operand, rule
from torchrec_picasso.proof.values import SAMPLES, Kind, UnprovedError, Value, plain

__all__: list[str] = []


@rule("view _unsafe_view reshape _reshape_alias", numbers=True, linear=True, places=True)
def view(call: Call) -> Value:
    """Reshapes; the batch must stay between the same neighbours in memory."""
    operand = call.only()
    value, tensor, (out,) = operand.value, operand.tensor, call.outputs
    if out.dtype != tensor.dtype and (value.counted or value.feature):
        raise UnprovedError("makes other numbers of places in the batch")
    dims, sizes = call.sizes.batch_dims(out), call.args["size"]
    if value.rows != SAMPLES and -1 in sizes and any(sizes[dim] != -1 for dim in dims):
        raise UnprovedError("infers a size from lookups, which may be none")
    if tuple(map(str, out.shape)) == tuple(map(str, tensor.shape)):
        return value
    if value.kind is not Kind.ROWS:
        raise UnprovedError(f"gives {value.kind.value} another shape")
    times = call.sizes.times(out.shape[dims[0]], value.rows) if len(dims) == 1 else None
    if times is None:
        raise UnprovedError("splits the batch, or multiplies it: sizes other than the batch's meet")
    (dim,) = dims
    # entries before the batch: outer blocks times the dims in front; they must stay whole blocks
    before = prod(tensor.shape[: value.dim]) * value.outer
    outer, rest = divmod(before, prod(out.shape[:dim]) or 1)
    if rest or not outer or times % outer:
        raise UnprovedError("takes entries of different samples for those of one")
    return replace(value, outer=outer, feature="")


@rule("permute transpose t unsqueeze squeeze", linear=True, places=True)
def turned(call: Call) -> Value:
    """Reorders dims, adds one, or drops those of one entry."""
    operand = call.only()
    if call.name == "squeeze" and operand.value.dim in call.dims(operand):
        raise UnprovedError("drops the batch's dim where there is one sample; name another dim")
    return _kept(operand)


def _kept(operand: Operand) -> Value:
    """Keeps rows and positions, but not whose lengths they are."""
    if operand.value.kind is not Kind.ROWS:
        raise UnprovedError(f"turns {operand.value.kind.value}")
    return replace(operand.value, feature="")


@rule("expand repeat", numbers=True, linear=True, places=True)
def repeated(call: Call) -> Value:
    """Repeats entries along dims; ``expand`` only along new ones, or those of one entry."""
    if not call.varying:
        return call.filled()
    operand = call.only()
    if call.name == "repeat" and (call.numbers or call.args["repeats"][operand.place] != 1):
        raise UnprovedError("repeats the batch")
    return _kept(operand)


@rule("slice narrow", numbers=True, linear=True, places=True)
def slice_(call: Call) -> Value:
    """Selects consecutive indices of a dim; of offsets, all but the last or the first."""
    operand = call.only()
    value, (out,), (dim,) = operand.value, call.outputs, call.dims(operand)
    start, step = call.args.get("start") or 0, call.args.get("step", 1)
    if step == 1 and str(out.shape[dim]) == str(operand.tensor.shape[dim]):
        return value
    if value.kind is Kind.ROWS and dim != value.dim and not call.numbers:
        return _kept(operand)
    is_known = isinstance(start, int) and start in (0, 1) and step == 1
    if value.kind is Kind.OFFSETS and is_known and call.sizes.times(out.shape[0], SAMPLES) == 1:
        return Value(Kind.ROWS, rows=SAMPLES, counted=value.feature)
    raise UnprovedError("takes some places of the batch and leaves others")


@rule("cat stack", partial=True)
def cat(call: Call) -> Value:
    """Concatenates or stacks tensors; the operator fails if their rows differ in number."""
    kinds, varying = {operand.value.kind for operand in call.operands}, call.varying
    if kinds <= {Kind.SAME, Kind.MEAN} or kinds == {Kind.SUM}:
        return Value(varying[0].value.kind)
    if kinds != {Kind.ROWS}:
        raise UnprovedError("puts entries of samples beside what are none")
    found = call.same_rows(varying)
    (dim, *others) = {operand.value.dim for operand in varying}
    is_along = call.name == "cat" and call.args.get("dim", 0) % call.outputs[0].dim() == dim
    if others or is_along:
        raise UnprovedError("puts samples behind samples")
    for operand in varying:
        call.sizes.fail_unless_same(found.rows, operand.value.rows)
    return found


@rule("embedding")
def embedding(call: Call) -> Value:
    """Looks up rows of a table."""
    if call.args["scale_grad_by_freq"]:
        raise UnprovedError("scales gradients by how often the batch has an index")
    if not call.operand("weight").is_same:
        raise UnprovedError("looks up in a table that depends on the batch")
    return call.aligned([call.operand("indices")])


@rule("index _unsafe_index index_select", linear=True, places=True)
def index(call: Call) -> Value:
    """Selects entries by indices of one or several dims."""
    operand = call.operand("self")
    indices = [other for other in call.operands if other.name in ("indices", "index")]
    dims = call.dims(operand)
    if "indices" in call.args:
        dims = [dim for dim, one in enumerate(call.args["indices"]) if one is not None]
    by_dim = dict(zip(dims, indices))
    if any(str(other.tensor.dtype) in ("torch.bool", "torch.uint8") for other in indices):
        raise UnprovedError("takes the entries that fulfil a condition")
    if operand.value.kind not in (Kind.SAME, Kind.ROWS):
        raise UnprovedError(f"looks up in {operand.value.kind.value}")
    # the index along the batch must be the position of each entry's own row
    own = None if operand.is_same else by_dim.pop(operand.value.dim, None)
    if any(other.value.counted for other in by_dim.values()):
        raise UnprovedError("looks up by places in the batch")
    if operand.is_same:
        return call.aligned(indices)
    if own is None:
        if any(not other.is_same for other in indices):
            raise UnprovedError("puts every sample beside every other sample")
        return _kept(operand)
    _require_own(call, operand, own)
    found = call.aligned(indices)
    return replace(found, counted=operand.value.counted, is_own=operand.value.is_own)


def _require_own(call: Call, operand: Operand, index: Operand) -> None:
    """Requires an index into the batch to be the position of each entry's own row."""
    value = index.value
    if value.kind is not Kind.ROWS or not value.is_own:
        raise UnprovedError("takes entries of other samples, by an index into the batch")
    if value.outer != 1:
        raise UnprovedError("takes samples in different orders")
    call.require_single(operand)
    call.want_same(value.counted, operand.value.rows)


@rule("gather scatter scatter_add scatter_reduce")
def gather(call: Call) -> Value:
    """Selects or writes entries of one dim, with other indices for each sample."""
    if any(operand.is_same for operand in call.operands):
        raise UnprovedError("takes entries by an index that is not one of each sample")
    # all operands have the batch in one dim, and the index works along another one
    found, operand = call.same_rows(call.operands), call.operand("self")
    (batch_dim, *others) = {other.value.dim for other in call.operands}
    if others or call.dims(operand) == [batch_dim]:
        raise UnprovedError("takes entries of other samples, by an index into the batch")
    if len({call.sizes.inner(other.tensor, other.value) for other in call.operands}) > 1:
        raise UnprovedError("takes entries of different samples for those of one")
    return found


@rule("index_add", places=True)
def index_add(call: Call) -> Value:
    """Adds each row to the sample that it belongs to, such as pooling by hand."""
    operand, index, source = call.operand("self"), call.operand("index"), call.operand("source")
    if any(other.value.kind is not Kind.ROWS or other.value.counted for other in (operand, source)):
        raise UnprovedError("adds to what are no entries of samples, or places in the batch")
    if not (call.dims(operand) == [operand.value.dim] == [source.value.dim]):
        raise UnprovedError("adds entries to those of other samples")
    _require_own(call, operand, index)
    call.require_single(source)
    call.want_same(source.value.rows, index.value.rows)
    return plain(operand.value)


@rule("repeat_interleave", numbers=True)
def repeat_interleave(call: Call) -> Value:
    """Repeats the position of each sample for its lookups."""
    repeats = call.operand("repeats")
    feature = repeats.value.feature
    if not feature or repeats.tensor.dim() != 1:
        raise UnprovedError("repeats samples by numbers that are not the lengths of a feature")
    if call.sizes.times(call.outputs[0].shape[0], feature) != 1:
        raise UnprovedError("repeats samples to another number than that of the feature's lookups")
    return Value(Kind.ROWS, rows=feature, counted=repeats.value.rows, is_own=True)


@rule("fbgemm.asynchronous_complete_cumsum")
def offsets(call: Call) -> Value:
    """Computes offsets from lengths: the first lookup of each sample."""
    lengths = call.only()
    if not lengths.value.feature or lengths.tensor.dim() != 1:
        raise UnprovedError("adds up along the batch")
    return Value(Kind.OFFSETS, rows=lengths.value.rows, feature=lengths.value.feature)


@rule(
    "fbgemm.jagged_2d_to_dense fbgemm.jagged_1d_to_dense fbgemm.jagged_to_padded_dense "
    "fbgemm.jagged_to_padded_dense_forward",
    places=True,
)
def to_dense(call: Call) -> Value:
    """Pads each sample's lookups to rows of equal length, ``(n, D)`` -> ``(B, L, D)``."""
    # values and offsets must belong to the same lookups
    _require_list(call, call.operand("values"), _feature_of(call))
    return Value(Kind.ROWS, rows=SAMPLES)


@rule("fbgemm.dense_to_jagged fbgemm.dense_to_jagged_forward", numbers=True, places=True)
def to_jagged(call: Call) -> Sequence[Value]:
    """Removes the padding: entries of each sample up to its length, ``(B, L, D)`` -> ``(n, D)``."""
    feature = _feature_of(call)
    if call.sizes.times(call.outputs[0].shape[0], feature) != 1:
        raise UnprovedError("gives another number of rows than the feature has lookups")
    _require_list(call, call.operand("dense"), SAMPLES)
    places = [operand.value for operand in call.varying if operand.value.kind is Kind.OFFSETS]
    return [Value(Kind.ROWS, rows=feature), *(places * len(call.outputs[1:]))]


def _feature_of(call: Call) -> str:
    names = ("offset", "offsets", "x_offsets")
    places = [operand.value for operand in call.operands if operand.name in names]
    if len(places) != 1 or places[0].kind is not Kind.OFFSETS:
        raise UnprovedError("has offsets that are not those of one feature")
    return places[0].feature


def _require_list(call: Call, operand: Operand, rows: str) -> None:
    """Requires one entry in dim 0 for each of these rows."""
    if not call.sizes.is_list(operand.tensor, operand.value):
        raise UnprovedError(f"takes what is not one entry for each of {rows}")
    call.want_same(operand.value.rows, rows)


@rule(
    "fbgemm.permute_multi_embedding fbgemm.permute_multi_embedding_function "
    "fbgemm.regroup_keyed_tensor fbgemm.permute_pooled_embs_auto_grad fbgemm.permute_pooled_embs"
)
def regroup(call: Call) -> Value:
    """Reorders columns of pooled tensors ``(B, sum of D)``."""
    pooled = [op for op in call.operands if op.name in ("pooled_embs", "embs", "keyed_tensors")]
    if any(operand.is_same or operand.value.dim for operand in [*pooled, *call.varying]):
        raise UnprovedError("regroups what is not one row per sample")
    return call.same_rows(call.varying)
