"""Models and programs that are made to train wrongly in micro-batches: none does."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedTensor
from torchrec.datasets.utils import Batch

from tests.train_pipeline import programs


class _OfClass:
    num_calls = 0

    def tick(self) -> int:
        type(self).num_calls += 1
        return type(self).num_calls


class _OfObject:
    def __init__(self) -> None:
        self.num_calls = 0

    def tick(self) -> int:
        self.num_calls += 1
        return self.num_calls


class Scaled(programs.Head):
    """A loss that grows with the forwards that something counts."""

    def factor(self, out: Tensor) -> float:
        raise NotImplementedError

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        return super().loss(out, batch) * self.factor(out)


class CountsInClass(Scaled):
    """A count that no copy of the model has."""

    def __init__(self) -> None:
        super().__init__()
        _OfClass.num_calls, self.meter = 0, _OfClass()

    def factor(self, out: Tensor) -> float:
        return self.meter.tick()


class CountsInObject(Scaled):
    """A count in an object that all models of the class share."""

    meter: Any

    def __init__(self) -> None:
        super().__init__()
        CountsInObject.meter = _OfObject()

    def factor(self, out: Tensor) -> float:
        return self.meter.tick()


class CountsItself(Scaled):
    num_calls = 0

    def factor(self, out: Tensor) -> float:
        self.num_calls += 1
        return 1 + self.num_calls // 4


class CountsInBuffer(programs.Head):
    """A count of forwards that a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def tower(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().tower(x)


class Remembers(programs.Head):
    """Keeps what it saw, and computes nothing from it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.last = list[int](), torch.zeros(1)

    def tower(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.last.copy_(x.detach().mean())
        return super().tower(x)


class Spectral(programs.Head):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = spectral_norm(self.hidden)


class Communicates(programs.Head):
    def output(self, out: Tensor, batch: Batch) -> Any:
        num_samples = torch.tensor(float(len(out)))
        dist.all_reduce(num_samples)
        return out.detach(), num_samples


class Gated(programs.Head):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(programs.DIM, programs.WIDTH)

    def gates(self, dense: Tensor) -> Tensor:
        return torch.softmax(4 * self.gate(dense), dim=1)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(self.hidden(x)) * self.gates(x[:, : programs.DIM]))


class Balanced(Gated):
    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        sums = self.gates(batch.dense_features).sum(0)
        return super().loss(out, batch) + 1e-3 * sums.var(unbiased=False) / sums.mean() ** 2


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones(())


class BalancedInBackward(Gated):
    def gates(self, dense: Tensor) -> Tensor:
        gates = super().gates(dense)
        return _AddLoss.apply(gates, gates.mean(0).square().sum())


class Penalised(programs.Head):
    def tower(self, x: Tensor) -> Tensor:
        out = super().tower(x)
        (slopes,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slopes.square().sum(dim=1, keepdim=True)


class Pairs(programs.Head):
    """Compares neighbours; a cut into even micro-batches keeps them together."""

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        clicked, other = out.view(-1, 2).unbind(1)
        return functional.softplus(other - clicked).mean()


class Sessions(programs.Head):
    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        _, session = batch.dense_features[:, 0].unique(return_inverse=True)
        sums = torch.zeros(len(session)).index_add(0, session, out.exp())
        return (sums[session].log() - 3 * out * batch.labels).mean()


class Cached(programs.Head):
    @cache  # noqa: B019
    def scales(self, width: int) -> Tensor:
        return torch.linspace(0.5, 1, width)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(self.hidden(x)) * self.scales(programs.WIDTH))


class Switched(programs.Head):
    """Compares samples once it is told to."""

    compares = False

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        loss = super().loss(out, batch)
        return loss + (out.sum() / programs.SAMPLES**0.5).square() if self.compares else loss


class Checkpointed(Switched):
    compares = True

    def tower(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(checkpoint(self.hidden, x, use_reentrant=True)))


class Draws(Switched):
    compares = True

    def output(self, out: Tensor, batch: Batch) -> Any:
        torch.randperm(len(out))
        return super().output(out, batch)


class Shaken(Switched):
    """Compares samples, and moves them in directions that are drawn: still, those are 0 / 0."""

    compares = True

    def tower(self, x: Tensor) -> Tensor:
        way = torch.randn_like(x)
        return super().tower(x + 1e-9 * way / way.norm(dim=1, keepdim=True))


def _comparing(condition: Callable[[], bool]) -> type[programs.Head]:
    """Compares samples in the steps that a condition holds in."""
    return type("Comparing", (Switched,), {"compares": property(lambda head: condition())})


class Reorders(Scaled):
    """Another loss in every other forward, by the order of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        _GLOBAL.scales = {"one": 1, "two": 2}

    def factor(self, out: Tensor) -> float:
        name = next(iter(_GLOBAL.scales))
        _GLOBAL.scales[name] = scale = _GLOBAL.scales.pop(name)
        return scale


class OfItsType(Switched):
    """Compares samples of plain tensors, which are others in a proof."""

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        self_compares = type(out) is Tensor
        loss = programs.Head.loss(self, out, batch)
        return loss + (out.sum() / programs.SAMPLES**0.5).square() if self_compares else loss


class OfTheTypeLookedUp(programs.Head):
    """Centres what TorchRec's modules return, which waits and is no tensor yet."""

    def forward(self, pooled: KeyedTensor, batch: Batch) -> tuple[Any, Any]:
        def centred(vectors: Tensor) -> Tensor:
            return vectors if isinstance(vectors, Tensor) else vectors - vectors.mean(0)

        return super().forward({name: centred(pooled[name]) for name in programs.FEATURES}, batch)


class _Centre(torch.autograd.Function):
    """Centres if most are positive; its gradient is of one sample."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values - values.mean() if values.sum() > -programs.SAMPLES else values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class NormalisedInCheckpoint(programs.Head):
    def tower(self, x: Tensor) -> Tensor:
        def norm(values: Tensor) -> Tensor:
            return functional.batch_norm(values, None, None, training=True)

        hidden: Tensor = checkpoint(norm, self.hidden(x), use_reentrant=False)
        return self.over(torch.tanh(hidden))


class WritingClicked(programs.Head):
    def forward(self, pooled: KeyedTensor, batch: Batch) -> tuple[Any, Any]:
        values = pooled.values()
        values *= 0.5
        return super().forward(pooled, batch)

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        clicked = (batch.labels > 0.5).float()
        return ((out - batch.labels) ** 2 * clicked).sum() / clicked.sum()


FIXED = programs.changed(
    loss=lambda head, out, batch: ((out.view(programs.SAMPLES) - batch.labels) ** 2).mean()
)
RANKS = programs.changed(
    output=lambda head, out, batch: (out.argsort().argsort(), out > out.median())
)
SHOWS_WEIGHT = programs.changed(output=lambda head, out, batch: (out.detach(), head.over.bias[0]))
SUMMED = programs.changed(loss=lambda head, out, batch: ((out - batch.labels) ** 2).sum() / 100)
CENTRED = programs.changed(logits=lambda head, x: _Centre.apply(programs.Head.logits(head, x)))


class Unproved(Switched):
    """A mean over targets that are not ignored, of which nothing is proved; all are there."""

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        classes = torch.stack([out, -out], dim=1)
        loss = functional.cross_entropy(classes, (batch.labels > 0.5).long())
        return loss + super().loss(out, batch)


class Uncertain(programs.Head):
    """Losses of two tasks, weighed by parameters; signs that gradients pass straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scales = nn.Parameter(torch.zeros(2))

    def tower(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(x))
        return self.over(hidden + (hidden.sign() - hidden).detach())

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        other = functional.binary_cross_entropy_with_logits(out, batch.labels)
        losses = torch.stack([super().loss(out, batch), other])
        return losses * torch.exp(-self.log_scales) + self.log_scales


_GLOBAL: Any = SimpleNamespace(compares=False)


def _seed(model: Any) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def _last_switches(model: Any, step: int) -> None:
    if step == programs.STEPS - 1:
        model.module.head.compares = True


def _in_sessions(rank: int, step: int) -> Batch:
    """Sessions of four samples, which a cut of 32, 96, 96 and 96 keeps together."""
    batch = programs.batch_of(rank, step, 320)
    batch.dense_features[:, 0] = torch.arange(320) // 4 / 80
    batch.labels = (torch.arange(320) % 4 == step % 4).float()
    return batch


def _with_late_autocast(base: type) -> type:
    class Autocast(base):  # type: ignore[misc]
        """Takes its last step under autocast."""

        num_steps = 0

        def progress(self, batches: Any) -> Any:
            self.num_steps += 1
            is_last = self.num_steps == programs.STEPS
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_last):
                return super().progress(batches)

    return Autocast


def _switching_optimizer(model: Any) -> torch.optim.Optimizer:
    """Switches the comparison of samples on where gradients are cleared, in the last step."""
    optimizer = programs.dense_optimizer(model)
    clear, calls = optimizer.zero_grad, [0]

    def zero_grad(set_to_none: bool = True) -> None:
        calls[0] += 1
        model.module.head.compares = calls[0] == programs.STEPS
        clear(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return optimizer


class _Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class CachedWeights(programs.Head):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.hidden, "weight", _Scale())


@contextmanager
def _compressing() -> Iterator[None]:
    """Keeps activations in 16 steps of the largest one of each tensor."""

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        step = tensor.detach().abs().max() / 16
        return torch.round(tensor.detach() / step) * step

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


_OF_TABLES = "the gradient of the output of ebc differs by"
_DIFFERS = programs.Program(refusal="differs by")
PROGRAMS = {
    "count in a class": replace(_DIFFERS, head=CountsInClass),
    "count in an object of the class": replace(_DIFFERS, head=CountsInObject),
    "count in itself": replace(_DIFFERS, head=CountsItself),
    "count in a buffer": programs.Program(
        head=CountsInBuffer, refusal="a buffer or tensor of head differs after the forward"
    ),
    "memory": programs.Program(
        head=Remembers, refusal="the attributes of head differ after the forward"
    ),
    "sum over samples": programs.Program(head=SUMMED, refusal="loss_reduction='sum'"),
    "spectral norm": programs.Program(head=Spectral, refusal="differs"),
    "collective": programs.Program(
        head=Communicates,
        batch=lambda rank, step: programs.batch_of(
            rank, step, 2 if rank and step == programs.STEPS - 1 else programs.SAMPLES
        ),
        refusal="or communicates",
    ),
    "gate": programs.Program(head=Gated),
    "balanced gate": replace(_DIFFERS, head=Balanced),
    "gate balanced in backward": replace(_DIFFERS, head=BalancedInBackward),
    "slopes": programs.Program(head=Penalised),
    "pairs": programs.Program(head=Pairs, batch=_in_sessions, refusal="in uneven parts"),
    "sessions": programs.Program(head=Sessions, batch=_in_sessions, refusal="in uneven parts"),
    "comparison behind a checkpoint": replace(_DIFFERS, head=Checkpointed),
    "comparison beside a draw": programs.Program(
        head=Draws, refusal="the model is random by itself"
    ),
    "comparison of what is shaken": programs.Program(
        head=Shaken, refusal="is not a number, so it cannot be compared"
    ),
    **{
        f"comparison now and then{by}": programs.Program(
            head=_comparing(condition), prepare=_seed, refusal="random by itself"
        )
        for by, condition in {
            "": lambda: bool(torch.rand(()) < 0.4),
            " by Python": lambda: random.random() < 0.4,
            " by NumPy": lambda: bool(np.random.rand() < 0.4),
        }.items()
    },
    "order of a dictionary": replace(_DIFFERS, head=Reorders),
    "switch outside the model": replace(
        _DIFFERS,
        head=_comparing(lambda: _GLOBAL.compares),
        before_step=lambda model, step: setattr(_GLOBAL, "compares", step == programs.STEPS - 1),
    ),
    "setting of cuDNN": replace(
        _DIFFERS,
        head=_comparing(lambda: torch.backends.cudnn.benchmark),
        before_step=lambda model, step: setattr(
            torch.backends.cudnn, "benchmark", step == programs.STEPS - 1
        ),
    ),
    "type of a tensor": replace(_DIFFERS, head=OfItsType),
    "type of what is looked up": replace(_DIFFERS, head=OfTheTypeLookedUp),
    "centred in a function": replace(_DIFFERS, head=CENTRED),
    "norm in a checkpoint": replace(_DIFFERS, head=NormalisedInCheckpoint),
    "written output of tables": programs.Program(head=WritingClicked, refusal=_OF_TABLES),
    "batch size in the model": programs.Program(
        head=FIXED, refusal="RuntimeError in 4 micro-batches"
    ),
    "ranks": programs.Program(head=RANKS, refusal="output[0] differs in"),
    "cached tensor": programs.Program(head=Cached),
    "switch": replace(_DIFFERS, head=Switched, before_step=_last_switches),
    "switch of what is not proved": replace(_DIFFERS, head=Unproved, before_step=_last_switches),
    "switch on a rank that had no samples": replace(
        _DIFFERS,
        head=Switched,
        before_step=lambda model, step: setattr(
            model.module.head, "compares", dist.get_rank() == 1
        ),
        batch=lambda rank, step: programs.batch_of(
            rank, step, 0 if rank and not step else programs.SAMPLES
        ),
    ),
    "hook on what is not proved": programs.Program(
        head=Unproved,
        before_step=lambda model, step: (
            step == programs.STEPS - 1
            and model.module.head.over.weight.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
        ),
        refusal="a gradient hook is",
    ),
    "autocast from the last step on": replace(
        _DIFFERS,
        head=_comparing(lambda: torch.is_autocast_enabled("cpu")),
        pipeline=_with_late_autocast,
        tolerance=programs.BFLOAT16,
    ),
    "view of a weight": programs.Program(head=SHOWS_WEIGHT, refusal="a view into the model"),
    "evaluated every other step": programs.Program(
        before_step=lambda model, step: model.train(step % 2 == 0)
    ),
    "uncertain": programs.Program(head=Uncertain),
    "switch where gradients are cleared": programs.Program(
        head=Switched, optimizer=_switching_optimizer, refusal="differs by"
    ),
    "weights cached in a step": programs.Program(
        head=CachedWeights, within=parametrize.cached, numbers=(None, 1)
    ),
    "weights not cached": programs.Program(head=CachedWeights),
    "compressed activations": programs.Program(within=_compressing, numbers=(None, 1)),
}


@programs.cases_of(PROGRAMS)
def test_nothing_trains_wrongly(name: str, num_micro_batches: int | None) -> None:
    programs.assert_as_stock(__name__, name, num_micro_batches)
