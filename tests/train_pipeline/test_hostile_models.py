"""Models and programs that are made to train wrongly in micro-batches: none does.

Models that micro-batches would make others of are found by trying; legal ones are let be. How long
a step of the trial lasts: with what ranks wait for between steps."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedTensor
from torchrec.datasets.utils import Batch

from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.train_pipeline import programs
from tests.train_pipeline.runs import run_to_the_end
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import CompatError
from torchrec_picasso.schedule.schedule import NUM_BATCHES, Setting
from torchrec_picasso.train_pipeline import micro_batch_policy
from torchrec_picasso.train_pipeline.micro_batch_policy import MicroBatchPolicy, is_due


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
    """Its loss grows with the forwards that something counts."""

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


class _Legal(programs.Head):
    """A mean over samples, dropouts of all kinds, a norm over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(programs.WIDTH), nn.Dropout(0.5)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(self.drop(self.act(self.norm(self.hidden(x)))))

    def act(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(hidden), 0.25)


class _Clicked(_Legal):
    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        clicked = (batch.labels > 0.5).float()
        return ((out - batch.labels) ** 2 * clicked).sum() / clicked.sum()


class _Counting(_Legal):
    """A count of forwards that a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def act(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        return hidden


class _Remembering(_Legal):
    """Keeps what it saw, in every way that a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.calls, self.sizes = 0, []
        self.last = torch.zeros(1)

    def act(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        self.sizes.append(hidden.size(0))
        self.last.copy_(hidden.detach().mean())
        self.new = hidden.size(0)
        return super().act(hidden)


_SUMMED = programs.changed(_Legal, loss=lambda head, out, batch: ((out - batch.labels) ** 2).sum())
_NOISY = programs.changed(_Legal, act=lambda head, hidden: hidden * float(np.random.rand()))


FOUND: dict[str, tuple[type[programs.Head], list[str]]] = {
    "clicked": (_Clicked, ["the gradient of the output of ebc differs by"]),
    "summed": (_SUMMED, ["the gradient of the output of ebc differs by", "loss_reduction='sum'"]),
    "counting": (_Counting, ["a buffer or tensor of head differs after the forward"]),
    "remembering": (_Remembering, ["the attributes of head differ after the forward"]),
    "noisy": (_NOISY, ["the model is random by itself or communicates (numpy.random)"]),
}
"""More are in ``test_hostile_models.py``, compared with stock where they train whole."""


def _batches(rank: int, num_steps: int) -> list[Batch]:
    return [programs.batch_of(rank, step, programs.SAMPLES) for step in range(num_steps)]


def _pipeline(model: Any, **settings: Any) -> InterleavedTrainPipeline:
    return InterleavedTrainPipeline(
        model, programs.dense_optimizer(model, lr=0.01), programs.CPU, **settings
    )


def _refused(rank: int, world_size: int) -> dict[str, Any]:
    """What asks for micro-batches is refused in the first step; what does not, trains whole."""
    told: dict[str, Any] = {}
    for name, (make, _) in FOUND.items():
        model = programs.build(programs.Model(make), ())
        before = programs.left_behind(model)
        pipeline = _pipeline(model, num_micro_batches=4)
        # on one rank alone it would not show
        batches = (
            _batches(rank, 3)
            if name != "clicked" or rank
            else [_all_clicked(batch) for batch in _batches(rank, 3)]
        )
        for _ in range(2):
            with pytest.raises(CompatError) as refused:
                pipeline.progress(iter(batches))
        torch.testing.assert_close(programs.left_behind(model), before, rtol=0, atol=0)
        automatic = _pipeline(programs.build(programs.Model(make), ()), lookahead=True)
        run_to_the_end(automatic, iter(batches))
        told[name] = str(refused.value), automatic.num_micro_batches, automatic.summary()
    return told


def _all_clicked(batch: Batch) -> Batch:
    batch.labels = 0.5 + batch.labels / 2
    return batch


@pytest.mark.parametrize("name", list(FOUND))
def test_a_difference_is_found_on_all_ranks_before_the_first_step(name: str) -> None:
    by_rank = run_once(_refused, 2)
    refused, num_micro_batches, summary = by_rank[0][name]
    assert by_rank[1][name] == by_rank[0][name]
    for part in FOUND[name][1]:
        assert part in refused
    assert "use num_micro_batches=1" in refused.lower()
    assert num_micro_batches == 1
    assert "batches are whole: " in summary.splitlines()[-1]


def _untouched(rank: int, world_size: int) -> dict[Any, Any]:
    """The same training with comparisons and without, dropouts at work."""
    results: dict[Any, Any] = {}
    for is_checked in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_checked:
                patch.setattr(micro_batch_policy, "is_due", lambda step: False)
            torch.manual_seed(7 + rank)
            model = programs.build(programs.Model(_Legal), ())
            pipeline = _pipeline(model, num_micro_batches=4, lookahead=True)
            outputs = run_to_the_end(pipeline, iter(_batches(rank, 5)))
            results[is_checked] = outputs, programs.left_behind(model), float(torch.rand(1))
    return results


def test_a_legal_model_is_trained_to_the_bit_as_without_comparisons() -> None:
    for results in run_ranks(_untouched, 2, timeout_s=120):
        torch.testing.assert_close(results[True], results[False], rtol=0, atol=0)
        assert len(results[True][0]) == 5


def _another(rank: int, world_size: int) -> str:
    """A legal model, then another one in the same pipeline."""
    pipeline = _pipeline(programs.build(programs.Model(_Legal), ()), num_micro_batches=4)
    batches = _batches(rank, 6)
    run_to_the_end(pipeline, iter(batches[:3]))
    pipeline.detach()
    pipeline.attach(programs.build(programs.Model(_Clicked), ()))
    return refusal(CompatError, pipeline.progress, iter(batches[3:]))


def test_another_model_is_looked_at_in_its_first_step() -> None:
    for told in run_ranks(_another, 2, timeout_s=60):
        assert "the gradient of the output of ebc differs" in told


class _LateClicked(_Clicked):
    """Without dropout, so that it compares with another pipeline's run."""

    def tower(self, x: Tensor) -> Tensor:
        return self.over(self.norm(self.hidden(x)))


def _late(rank: int, world_size: int) -> str:
    """All samples are clicked, until in the eighth step they are not."""
    batches = [
        _all_clicked(batch) if step < 7 else batch for step, batch in enumerate(_batches(rank, 12))
    ]
    pipeline = _pipeline(programs.build(programs.Model(_LateClicked), ()), num_micro_batches=2)
    iterator = iter(batches)
    for _ in range(7):
        pipeline.progress(iterator)
    return refusal(CompatError, pipeline.progress, iterator)


def test_a_difference_that_shows_late_is_refused_in_that_very_step() -> None:
    for told in run_ranks(_late, 2, timeout_s=120):
        assert "in 2 micro-batches the gradient of the output of ebc" in told


def test_checks_become_rare() -> None:
    assert [step for step in range(1, 300) if is_due(step)] == [1, 2, 4, 8, 16, 64, 256]


SETTINGS = [Setting(1, lookahead=True)] * NUM_BATCHES


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[MicroBatchPolicy, list[Any]]:
    """A policy whose clock counts its stamps, and the spans that they record."""
    policy, spans, ticks = MicroBatchPolicy(None, None, torch.device("cpu")), [], count()
    policy._evidence = SimpleNamespace(pipelined=SimpleNamespace(pg=None))  # type: ignore[assignment]
    monkeypatch.setattr(policy._clock, "stamp", lambda: next(ticks))
    monkeypatch.setattr(policy._choice, "note_step", lambda _, span, *__: spans.append(span))
    return policy, spans


def test_a_step_lasts_from_the_end_of_the_step_before(
    timed: tuple[MicroBatchPolicy, list[Any]],
) -> None:
    policy, spans = timed
    for _ in range(3):
        policy.start_step()
        policy.end_step(SETTINGS)
    assert spans == [(0, 1), (1, 3), (3, 5)]  # stamps 2 and 4 are starts


def test_evaluation_between_steps_does_not_count(timed: tuple[MicroBatchPolicy, list[Any]]) -> None:
    policy, spans = timed
    policy.start_step()
    policy.end_step(SETTINGS)
    policy.train_whole_next()
    policy.start_step()
    policy.end_step(SETTINGS)
    assert spans == [(0, 1), (2, 3)]
