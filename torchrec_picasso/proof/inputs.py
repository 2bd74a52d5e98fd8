"""Makes copies of a batch and of tables' outputs without data, with symbols for sizes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import PLAIN_TYPES, children_of, rebuild
from torchrec_picasso.errors import CompatError
from torchrec_picasso.proof.follow import Follower
from torchrec_picasso.proof.values import SAME, SAMPLES, Kind, UnprovedError, Value


class Inputs:
    """Makes values without data that have the structure of given values. New symbols are added to
    the sizes of ``follower``, which gets to know the dependence of each tensor."""

    def __init__(self, follower: Follower, mode: FakeTensorMode, num_samples: int) -> None:
        self._follower, self._mode, self._num_samples = follower, mode, num_samples
        self._samples = follower.sizes.add(SAMPLES, num_samples)

    def like(self, value: Any, path: str, *, has_graph: bool = False) -> Any:
        """Makes a value like a batch or an output; raises UnprovedError if that cannot be cut.
        With ``has_graph`` gradients run back to floats, and the model may write into them."""
        if isinstance(value, Awaitable):
            value = value.wait()
        if isinstance(value, KeyedJaggedTensor):
            return self._keyed_jagged(value, path)
        if isinstance(value, JaggedTensor):
            shape = value.lengths().shape
            if shape != (self._num_samples,):
                expected = f"{self._num_samples} samples"
                raise UnprovedError(f"{path} has lengths of shape {tuple(shape)}, not {expected}")
            return self._jagged(path, value, value.values().size(0), has_graph)
        if isinstance(value, KeyedTensor):
            if value.key_dim() != 1:
                raise UnprovedError(f"{path} is a KeyedTensor of keys along dim {value.key_dim()}")
            values = self._tensor(value.values(), f"{path}.values()", has_graph)
            return KeyedTensor(value.keys(), value.length_per_key(), values)
        if isinstance(value, Tensor):
            return self._tensor(value, path, has_graph)
        members = children_of(value)
        if members is not None:
            made = [self.like(m, path + suffix, has_graph=has_graph) for suffix, m in members]
            try:
                return rebuild(value, made, path, "")
            except CompatError as error:
                raise UnprovedError(str(error)) from error
        if isinstance(value, PLAIN_TYPES):
            return value
        raise UnprovedError(f"{path} is a {type(value).__name__}, which cannot be cut by samples")

    def _tensor(self, tensor: Tensor, path: str, has_graph: bool) -> Tensor:
        """Makes a dense tensor: 0-d, or with samples in dim 0."""
        if tensor.dim() == 0:
            return self._make(tensor, (), SAME, has_graph)
        if tensor.size(0) != self._num_samples:
            shape, expected = tuple(tensor.shape), f"{self._num_samples} samples in dim 0"
            raise UnprovedError(f"{path} has shape {shape}, and not {expected}")
        sizes = (self._samples, *tensor.shape[1:])
        return self._make(tensor, sizes, Value(Kind.ROWS, rows=SAMPLES), has_graph)

    def _make(
        self, like: Tensor, sizes: tuple[Any, ...], value: Value, has_graph: bool = False
    ) -> Tensor:
        if type(like) not in (Tensor, nn.Parameter) or like.layout is not torch.strided:
            raise UnprovedError(f"holds a {type(like).__name__} of layout {like.layout}")
        if not has_graph and vars(like):
            raise UnprovedError(
                f"the batch has .{next(iter(vars(like)))} on a tensor, which micro-batches lack"
            )
        needs_grad = has_graph and like.is_floating_point()
        strides = None if like.is_contiguous() else like.stride()  # a model may branch on it
        if strides is not None and (has_graph or value != Value(Kind.ROWS, rows=SAMPLES)):
            raise UnprovedError("holds values that are not contiguous, which those of a part are")
        with self._mode, torch.enable_grad():
            made = torch.empty(sizes, dtype=like.dtype, device=like.device)
            if strides is not None:
                made = made.new_empty_strided(sizes, strides)
            made.requires_grad_(needs_grad)
            # a clone is no leaf, so the model may write into it
            if has_graph:
                made = made.clone()
        self._follower.know(made, value, is_input=not has_graph)
        return made

    def _jagged(
        self, path: str, like: Any, num_lookups: int, has_graph: bool = False
    ) -> JaggedTensor:
        """Makes one feature's lookups, of a number of their own, and a length per sample."""
        count, rows = self._follower.sizes.add(path, num_lookups), Value(Kind.ROWS, rows=path)
        per_sample = Value(Kind.ROWS, rows=SAMPLES, feature=path)
        values, weights = like.values(), like.weights_or_none()
        if weights is not None:
            weights = self._make(weights, (count, *weights.shape[1:]), rows)
        return JaggedTensor(
            values=self._make(values, (count, *values.shape[1:]), rows, has_graph),
            weights=weights,
            lengths=self._make(like.lengths(), (self._samples,), per_sample),
        )

    def _keyed_jagged(self, kjt: KeyedJaggedTensor, path: str) -> KeyedJaggedTensor:
        """Makes features: one symbol for each feature's lookups, packed values, and lengths."""
        if kjt.variable_stride_per_key() or kjt.inverse_indices_or_none() is not None:
            raise UnprovedError(f"{path} has a batch size per feature, or inverse indices")
        if kjt.stride() != self._num_samples:
            raise UnprovedError(f"{path} has {kjt.stride()} samples, not {self._num_samples}")
        keys, weights = kjt.keys(), kjt.weights_or_none()
        if not keys:
            raise UnprovedError(f"{path} has no features")
        # what to_dict() will return
        pairs = zip(keys, kjt.length_per_key())
        features = {key: self._jagged(f"{path}[{key!r}]", kjt, count) for key, count in pairs}
        # all features in one: entries whose order the rules do not follow
        total = self._follower.sizes.add(f"all of {path}", kjt.values().size(0))
        packed = Value(Kind.LOOKUPS)
        if weights is not None:
            weights = self._make(weights, (total, *weights.shape[1:]), packed)
        # lengths are feature by feature, (F * B,): rows of samples with F outer blocks
        per_sample = Value(Kind.ROWS, rows=SAMPLES, outer=len(keys))
        return _Features(
            keys=keys,
            values=self._make(kjt.values(), (total, *kjt.values().shape[1:]), packed),
            weights=weights,
            lengths=self._make(kjt.lengths(), (len(keys) * self._samples,), per_sample),
            stride=self._samples,
            length_per_key=[jagged.values().shape[0] for jagged in features.values()],
            jt_dict=features,
        )


class _Features(KeyedJaggedTensor):
    """Features that are taken apart by name, never by places in the values of all."""

    def __getitem__(self, key: str) -> JaggedTensor:
        return self.to_dict()[key]


def types_in(batch: Any) -> list[type]:
    """Lists the types of the containers in a batch, whose methods are the user's."""
    members = children_of(batch)
    inside = [kind for _, member in members or () for kind in types_in(member)]
    return inside if members is None else [type(batch), *inside]


def form_of(value: Any) -> Hashable:
    """Describes all of a batch that is neither data nor a size: a model may branch on it."""
    if isinstance(value, JaggedTensor | KeyedJaggedTensor):
        values, weights = value.values(), value.weights_or_none()
        form = form_of(values)
        if isinstance(value, KeyedJaggedTensor):
            # the pipeline sets attributes on these values
            form = tuple(value.keys()), value.variable_stride_per_key(), values.dtype
        return form, None if weights is None else weights.dtype
    if isinstance(value, KeyedTensor):
        return tuple(value.keys()), tuple(value.length_per_key()), form_of(value.values())
    if isinstance(value, Tensor):
        # attributes are counted too, since micro-batches lack them
        strides: tuple[int | None, ...] = ()
        if value.layout is torch.strided and not value.is_contiguous():
            first, *others = value.stride()
            # a transposed tensor has its number of samples as a stride
            strides = first, *(None if stride == value.shape[0] else stride for stride in others)
        return value.dtype, value.layout, strides, value.shape[1:], tuple(vars(value))
    members = children_of(value)
    if members is not None:
        extras = tuple(vars(value)) if hasattr(value, "__dict__") else ()
        return type(value), extras, tuple((name, form_of(member)) for name, member in members)
    return type(value), value if isinstance(value, Hashable) else id(value)
