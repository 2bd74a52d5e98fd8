"""The guard of a proof: asked before each step whether the model is still the proved one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchrec_picasso.proof.inputs import form_of
from torchrec_picasso.proof.snapshot import Snapshot

__all__ = ["Guard", "why_disturbed"]


def why_disturbed() -> str | None:
    """Names what a program has switched on that would see the tensors of a proof, or keep them."""
    # a mode that comes later, such as one that counts, needs no other proof
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    others = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    return _why_kept() or (f"the mode {others[0]} is active" if others else None)


def _why_kept() -> str | None:
    """Names what would keep tensors of a forward."""
    if parametrize._cache_enabled:
        return "torch.nn.utils.parametrize.cached() keeps weights from one forward to the next"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on tensors that are saved for backward are set"
    return None


class Guard:
    """The state of a model that a proof depends on, except its tensors' data."""

    def __init__(self, snapshot: Snapshot, batch: Any) -> None:
        self._snapshot = snapshot
        self._form: Hashable = form_of(batch)
        self._settings = _settings()

    def again(self, batch: Any) -> Guard | None:
        """Makes a guard of the current model, which no proof belongs to, and of a batch's form.

        ``None`` = the model's state cannot be read any more.
        """
        try:
            return Guard(self._snapshot.again(), batch)
        except Exception:  # any error of the user's attributes
            return None

    def changed(self, batch: Any = None) -> str | None:
        """Describes the first change since the proof; ``None`` = no change.

        The form of the next batch is compared too, if it is given.
        """
        try:
            return next(self._changes(batch), None)
        except Exception as error:  # any error of a comparison
            return f"attributes cannot be compared any more ({type(error).__name__}: {error})"

    def _changes(self, batch: Any) -> Iterator[str]:
        if batch is not None and form_of(batch) != self._form:
            yield "the batch has other fields, types, keys or plain values"
        if _settings() != self._settings:
            yield "a setting of PyTorch has changed: autocast, default type, gradients"
        yield from self._snapshot.changes()


def _settings() -> Hashable:
    """Settings of PyTorch by which a model may branch."""
    cudnn = torch.backends.cudnn
    return (
        _why_kept(),
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )
