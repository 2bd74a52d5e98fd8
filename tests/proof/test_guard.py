"""A proof holds as long as the model is as it was; whatever is changed is seen and named."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from tests.proof.models import Head, make_batch, proved
from torchrec_picasso.proof.inputs import form_of
from torchrec_picasso.proof.proof import prove

SCALE = 1.0


@dataclass
class Settings:
    scale: float
    steps: list[int]


class Watched(Head):
    """Reads an attribute, an object, a list, an attribute of its class and a global."""

    late = False
    power = 2

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings(1.0, [1, 2])
        self.scales = [1.0, 2.0]
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.weights = {"f": 1, "g": 2}

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        scale = SCALE * self.scales[0] * self.settings.scale
        loss = scale * ((logits - batch.labels) ** self.power).mean()
        return loss + logits.softmax(0).square().sum() if self.late else loss


def _first_to_end(values: dict[str, Any]) -> None:
    name = next(iter(values))
    values[name] = values.pop(name)


def test_an_untouched_model_has_not_changed() -> None:
    model, guard, batch = proved(Watched())
    assert guard.changed() is None
    assert guard.changed(make_batch(5)) is None
    batch.labels.mul_(2)
    with torch.no_grad():
        model.head.hidden.weight.mul_(2)
    model.head.hidden.weight.grad = torch.ones_like(model.head.hidden.weight)
    assert guard.changed(batch) is None


_CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda head: setattr(head, "late", True), "head"),
    "new attribute": (lambda head: setattr(head, "other", 1), "head.other"),
    "object": (lambda head: setattr(head.settings, "scale", 2.0), "head.settings.scale"),
    "list in an object": (lambda head: head.settings.steps.append(3), "head.settings"),
    "list": (lambda head: head.scales.__setitem__(0, 3.0), "head.scales"),
    "order of modules": (lambda head: _first_to_end(head.inner._modules), "head.inner"),
    "order of a dict": (lambda head: _first_to_end(head.weights), "head.weights"),
    "type in a dict": (lambda head: head.weights.update(f=1.0), "head.weights.f"),
    "training": (lambda head: head.inner.eval(), "head.inner"),
    "type": (lambda head: head.over.half(), "the type of head.over.bias"),
    "frozen": (lambda head: head.over.weight.requires_grad_(False), "head.over.weight"),
    "replaced module": (lambda head: setattr(head, "inner", nn.Identity()), "head"),
    "replaced parameter": (
        lambda head: setattr(head.over, "bias", nn.Parameter(torch.ones(1))),
        "head.over",
    ),
    "forward hook": (lambda head: head.inner.register_forward_hook(print), "inner._forward_hooks"),
    "parameter hook": (lambda head: head.over.weight.register_hook(print), "head.over.weight"),
    "replaced forward": (lambda head: setattr(head.inner, "forward", print), "head.inner"),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_is_seen(name: str) -> None:
    change, words = _CHANGES[name]
    model, guard, _ = proved(Watched())
    change(model.head)
    assert words in str(guard.changed())


def test_classes_and_globals_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    _, guard, _ = proved(Watched())
    with monkeypatch.context() as patch:
        patch.setattr(Watched, "power", 3)
        assert "the class Watched" in str(guard.changed())
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SCALE", 2.0)
        assert guard.changed() == "the global SCALE has changed"
    assert guard.changed() is None


def test_hooks_on_all_modules_are_watched() -> None:
    _, guard, _ = proved(Watched())
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert "all modules" in str(guard.changed())
    handle.remove()
    assert guard.changed() is None


def test_a_batch_of_another_form_is_seen() -> None:
    _, guard, batch = proved(Watched())
    labels = batch.labels
    batch.labels = labels.double()
    assert "the batch" in str(guard.changed(batch))
    batch.labels = torch.stack([labels] * 2, 1)[:, 0]  # not contiguous
    assert "the batch" in str(guard.changed(batch))
    batch.labels = labels
    assert guard.changed(batch) is None


def test_a_number_of_samples_that_is_a_stride_too_hides_nothing() -> None:
    cube = torch.ones(4, 4, 4)
    assert form_of(cube) != form_of(cube.transpose(1, 2))
    assert form_of(torch.ones(4, 2, 4)) == form_of(torch.ones(3, 2, 4))
    assert form_of(torch.ones(4, 5).t()) == form_of(torch.ones(4, 3).t())


def test_settings_of_torch_are_watched() -> None:
    _, guard, _ = proved(Watched())
    with torch.autocast("cpu"):
        assert "a setting of PyTorch" in str(guard.changed())
    assert guard.changed() is None


def test_a_guard_begins_again() -> None:
    model, guard, batch = proved(Watched())
    model.head.late = True
    assert guard.changed() is not None
    again = guard.again(batch)
    assert again.changed(batch) is None
    model.head.late = False
    assert again.changed() is not None


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class OfPairs(nn.Linear):
    def forward(self, batch: Pair) -> tuple[Tensor, Pair]:  # type: ignore[override]
        out = super().forward(batch.x).squeeze(1)
        return ((out - batch.y) ** 2).mean(), Pair(out, batch.y)


class Fields(dict[str, Tensor]):
    pass


class OfFields(OfPairs):
    def forward(self, batch: Fields) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        loss, (out, _) = super().forward(Pair(batch["x"], batch["y"]))
        return loss, out


def test_batches_may_be_of_a_class_that_was_never_copied() -> None:
    batch = Fields(x=torch.ones(8, 3), y=torch.ones(8))
    assert "__slotnames__" not in vars(Fields)  # Python adds it to the class at the first copy
    assert prove(OfFields(3, 1), batch, []).reason is None


def test_batches_and_outputs_may_be_named_tuples() -> None:
    assert prove(OfPairs(3, 1), Pair(torch.ones(8, 3), torch.ones(8)), []).reason is None
