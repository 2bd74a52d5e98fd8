"""Joins the outputs of micro-batches to the model's output for the whole batch.

Only values with an unambiguous meaning are joined: samples are concatenated, lookups too if it is
proved that rows are theirs, 0-d float tensors are means over samples and are averaged by size,
equal plain values stay. A sum over samples looks like a mean and is averaged too; a model that
returns a sum needs its own function.

Shape letters: B samples, F features, K micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.members import JAGGED_TYPES, children_of, made_like, rebuild
from torchrec_picasso.batches.split import PLAIN_TYPES
from torchrec_picasso.errors import CompatError, InputError

JOIN_ADVICE = (
    "give the pipeline join_outputs=, a function (outputs_K, sizes_K) -> output of the whole batch"
)


def join_outputs(
    outputs_K: Sequence[Any], sizes_K: Sequence[int], *, is_proved: bool = False
) -> Any:
    """Joins the outputs of micro-batches to the output of the whole batch.

    Tensors whose dim 0 is the micro-batch's size are concatenated, 0-d float tensors averaged with
    sizes as weights (in float32 at least), jagged and keyed tensors joined by sample. Dataclasses,
    NamedTuples, tuples, lists and dicts are joined member by member; equal plain values, and
    tensors that all micro-batches share, stay. Gradients flow through.

    ``is_proved`` tells that dim 0 of every tensor is of samples, or of the lookups of one feature,
    sample by sample (:func:`.prove`): then tensors of any numbers of rows are concatenated.

    An empty micro-batch does not count, for any output: not even a loss of NaN. If all are empty,
    the first one's output is that of the empty batch. A single output is returned unchanged.
    InputError if there is not one size per output; CompatError, with the place, if something cannot
    be joined, or micro-batches' outputs are built differently.
    """
    if not outputs_K or len(outputs_K) != len(sizes_K):
        raise InputError(
            f"{len(outputs_K)} outputs for {len(sizes_K)} sizes, expected one for each"
        )
    counted = [(output, size) for output, size in zip(outputs_K, sizes_K) if size]
    if not counted:
        return outputs_K[0]
    outputs, sizes = [list(column) for column in zip(*counted)]
    return outputs[0] if len(outputs) == 1 else _join(outputs, "output", sizes, is_proved)


def _join(values: list[Any], path: str, sizes: list[int], is_proved: bool) -> Any:
    """Joins values of one place of the output; ``path`` names it in errors."""
    # Tensor subclasses may differ between micro-batches, other types may not.
    values = [value.wait() if isinstance(value, Awaitable) else value for value in values]
    first = values[0]
    are_tensors = all(isinstance(value, Tensor) for value in values)
    if not are_tensors and any(type(value) is not type(first) for value in values):
        names = ", ".join(type(value).__name__ for value in values)
        raise CompatError(f"{path}: micro-batches gave different types ({names}); {JOIN_ADVICE}")
    members = children_of(first)
    if members is not None:
        return _join_members(values, [s for s, _ in members], path, sizes, is_proved)
    if isinstance(first, JAGGED_TYPES):
        return _join_jagged(values, path, sizes)
    if isinstance(first, KeyedTensor):
        return _join_keyed_tensors(values, path, sizes, is_proved)
    if isinstance(first, Tensor):
        return _join_tensors(values, path, sizes, is_proved)
    if isinstance(first, PLAIN_TYPES):
        if all(value is first or value == first for value in values):
            return first
        found = ", ".join(repr(value) for value in values)
        raise CompatError(f"{path}: micro-batches gave different values ({found}); {JOIN_ADVICE}")
    raise CompatError(f"{path}: do not know how to join {type(first).__name__}; {JOIN_ADVICE}")


def _join_members(
    values: list[Any], suffixes: list[str], path: str, sizes: list[int], is_proved: bool
) -> Any:
    by_suffix = [dict(children_of(value) or []) for value in values]
    for members in by_suffix:
        if members.keys() != set(suffixes):
            raise CompatError(
                f"{path}: micro-batches gave different members ({', '.join(suffixes)} and "
                f"{', '.join(members)}); {JOIN_ADVICE}"
            )
    by_member = {suffix: [members[suffix] for members in by_suffix] for suffix in suffixes}
    joined = [_join(own, path + suffix, sizes, is_proved) for suffix, own in by_member.items()]
    return rebuild(values[0], joined, path, JOIN_ADVICE)


def _join_tensors(values: list[Tensor], path: str, sizes: list[int], is_proved: bool) -> Tensor:
    first = values[0]
    are_samples = all(v.dim() and v.size(0) == size for v, size in zip(values, sizes))
    if are_samples or (is_proved and first.dim()):
        if all(value.shape[1:] == first.shape[1:] for value in values):
            return torch.cat(values)
    elif all(value is first for value in values):  # no samples, but a parameter or a constant
        return first
    elif all(value.dim() == 0 and value.is_floating_point() for value in values):
        return _weighted_mean(values, sizes)
    pairs = zip(values, sizes)
    found = ", ".join(f"{tuple(v.shape)} {v.dtype} for {size} samples" for v, size in pairs)
    raise CompatError(
        f"{path}: micro-batches gave tensors {found}; expected samples in dim 0, or a 0-d float "
        f"that is a mean over samples; {JOIN_ADVICE}"
    )


def _weighted_mean(values: list[Tensor], sizes: list[int]) -> Tensor:
    dtype = values[0].dtype
    # at least float32: a sum of half-precision terms would round more than the model does
    wide = torch.promote_types(dtype, torch.float32)
    terms = [value.to(wide) * (size / sum(sizes)) for value, size in zip(values, sizes)]
    return torch.stack(terms).sum().to(dtype)


def _join_keyed_tensors(
    values: list[KeyedTensor], path: str, sizes: list[int], is_proved: bool
) -> KeyedTensor:
    """Joins pooled outputs ``(B, sum of D)`` of equal keys along dim 0."""
    first = values[0]
    forms = {(tuple(v.keys()), tuple(v.length_per_key()), v.key_dim()) for v in values}
    if len(forms) > 1 or not first.key_dim():
        raise CompatError(
            f"{path}: expected KeyedTensors of the same keys and dims, with samples in dim 0; "
            f"{JOIN_ADVICE}"
        )
    own = [value.values() for value in values]
    joined = _join_tensors(own, f"{path}.values()", sizes, is_proved)
    return made_like(first, values=joined)


def _join_jagged(values: list[Any], path: str, sizes: list[int]) -> Any:
    """Joins jagged tensors, which are stored feature by feature, sample by sample."""
    first, keyed = values[0], dict[str, Any]()
    lookups_KF = [[value.values().size(0)] for value in values]
    if isinstance(first, KeyedJaggedTensor):
        if any(v.keys() != first.keys() or v.variable_stride_per_key() for v in values):
            raise CompatError(
                f"{path}: expected KeyedJaggedTensors of the same keys and of one batch size for "
                f"all keys; {JOIN_ADVICE}"
            )
        keyed = {"stride": sum(sizes)}
        if not first.keys():
            return made_like(first, **keyed)
        lookups_KF = [value.length_per_key() for value in values]
    # lengths (F * B_k,) of each micro-batch -> (F, B_k), side by side -> (F, B) -> (F * B,)
    num_features = len(lookups_KF[0])
    lengths_of_K = [value.lengths().reshape(num_features, -1) for value in values]
    found = [lengths.size(1) for lengths in lengths_of_K]
    if found != sizes:
        raise CompatError(
            f"{path}: micro-batches gave jagged tensors of {found} samples, expected "
            f"{sizes}; {JOIN_ADVICE}"
        )
    if len({value.weights_or_none() is None for value in values}) > 1:
        raise CompatError(
            f"{path}: some micro-batches gave weights and some did not; {JOIN_ADVICE}"
        )
    if first.weights_or_none() is not None:
        keyed["weights"] = _interleave([value.weights() for value in values], lookups_KF)
    keyed["lengths"] = torch.cat(lengths_of_K, dim=1).view(-1)
    return made_like(first, values=_interleave([v.values() for v in values], lookups_KF), **keyed)


def _interleave(values_K: list[Tensor], lookups_KF: list[list[int]]) -> Tensor:
    """Reorders lookups from micro-batch by micro-batch to feature by feature, ``(N,)``."""
    views_KF = [values.split(lookups_F) for values, lookups_F in zip(values_K, lookups_KF)]
    return torch.cat([view for views_K in zip(*views_KF) for view in views_K])
