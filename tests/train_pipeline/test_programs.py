"""Work of a program around its model happens as under TorchRec's pipeline, or is refused.

Modules of TorchRec's own beside ours, and models that use them in part, too; tables of both kinds
in one module are lines of ``docs/features.md``, which ``test_feature_table.py`` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.train_pipeline.backward_injection import (
    FirstGradTensorFinder,
    InjectionSite,
    InjectionTargetType,
    OutputDistTensorFinder,
)
from torchrec.distributed.types import ShardingType

from tests.train_pipeline.programs import (
    BFLOAT16,
    SAMPLES,
    STEPS,
    WIDTH,
    Head,
    Model,
    Program,
    assert_as_stock,
    batch_of,
    cases_of,
    changed,
    dense_optimizer,
    ebc,
    processed,
    sequences,
)
from tests.train_pipeline.runs import default_dtype
from tests.train_pipeline.test_refusals import drawn


class Siamese(Head):
    """A layer used twice behind reentrant checkpoints: each weight gets two gradients."""

    def tower(self, x: Tensor) -> Tensor:
        both = [checkpoint(self._hidden, part, use_reentrant=True) for part in (x, x.flip(1))]
        return self.over(both[0] - both[1])

    def _hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(x))


class Normed(Head):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(self.norm(self.hidden(x)))


class SparseGradients(Head):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(10, WIDTH, sparse=True)

    def tower(self, x: Tensor) -> Tensor:
        place = (x[:, 0] * 10).long().clamp(0, 9)
        return self.over(torch.tanh(self.hidden(x)) + self.places(place))


class Regular(Head):
    """A term of the weights, which counts whatever the samples."""

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        total = super().loss(out, batch) if len(out) else out.sum()
        return total + 0.1 * sum(p.square().sum() for p in self.hidden.parameters())


METRIC = changed(
    output=lambda head, out, batch: out.detach() if head.training else out.detach().median()
)
PRIOR = changed(loss=lambda head, out, batch: Head.loss(head, out, batch) * float(batch.prior[0]))
WEIGHING = changed(
    loss=lambda head, out, batch: (batch.sample_weight * (out - batch.labels) ** 2).mean()
)
NO_GRAPH = changed(loss=lambda head, out, batch: Head.loss(head, out, batch).detach())
DROPPING = changed(
    tower=lambda head, x: head.over(functional.dropout(head.hidden(x), training=head.training))
)
QUIET = changed(
    loss=lambda head, out, batch: Head.loss(head, out, batch) if head.training else None
)


class Unused(Head):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(1, 1)


class UsedByOne(Unused):
    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        is_first = dist.get_rank() == 0
        return super().loss(out + self.side(out[:, None])[:, 0] if is_first else out, batch)


class InBackward(Head):
    def __init__(self) -> None:
        super().__init__()
        apply_optimizer_in_backward(torch.optim.SGD, self.parameters(), {"lr": 0.1})


class Double(Head):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def tower(self, x: Tensor) -> Tensor:
        return super().tower(x.double())


class Squeezed(Head):
    """A squeeze that takes the dim of a single sample away."""

    def logits(self, x: Tensor) -> Tensor:
        return self.tower(x).squeeze()

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        return functional.binary_cross_entropy_with_logits(out, batch.labels)


class Ratio(Head):
    """Weighted losses over weights, and errors over a sum that is trained too."""

    def loss(self, out: Tensor, batch: Batch) -> Any:
        errors, weights = (out - batch.labels) ** 2, batch.dense_features[:, 0]
        sums = torch.stack([(errors * weights).sum(), errors.abs().sum()])
        totals = torch.stack([weights.sum(), (1 + out**2).sum()])
        return (sums, totals) if self.is_ours else sums / totals


class _Processed(Model):
    def make(self) -> None:
        self.fp, self.ebc = processed("f"), ebc("g", "h")

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        processed, pooled = self.fp(features), self.ebc(features)
        return {"f": processed["f"], "g": pooled["g"], "h": pooled["h"]}


class _Sequences(Model):
    def make(self) -> None:
        self.ec, self.ebc = sequences("f", "g"), ebc("h")

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        rows, pooled = self.ec(features), self.ebc(features)
        summed = {
            name: torch.segment_reduce(rows[name].values(), "sum", lengths=rows[name].lengths())
            for name in ("f", "g")
        }
        return {**summed, "h": pooled["h"]}


class _Frozen(Model):
    """One collection under ``no_grad``, one whose output is cut off, one trained."""

    def make(self) -> None:
        self.still, self.off, self.ebc = ebc("f"), ebc("g"), ebc("h")

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        with torch.no_grad():
            still = self.still(features)["f"]
        return {"f": still, "g": self.off(features)["g"].detach(), "h": self.ebc(features)["h"]}


class _Changed(Model):
    def make(self) -> None:
        self.changed, self.ebc = ebc("f"), ebc("g", "h")

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        changed, pooled = self.changed(drawn(features)), self.ebc(features)
        return {"f": changed["f"], "g": pooled["g"], "h": pooled["h"]}


class _Returned(Model):
    """Returns the pooled rows of two collections, and looks at those of one only."""

    def make(self) -> None:
        self.aside, self.ebc = ebc("f"), ebc("g", "h")

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        aside, pooled = self.aside(batch.sparse_features), self.ebc(batch.sparse_features)
        looked_at = {"f": pooled["g"], "g": pooled["g"], "h": pooled["h"]}
        loss, out = self.head(looked_at, batch)
        return loss, (out, aside, pooled)


class _Apart(Model):
    """Two collections of TorchRec's own, each with an exchange of its own in backward."""

    def make(self) -> None:
        self.fp, self.ec, self.ebc = processed("f"), sequences("g"), ebc("h")

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        processed, rows, pooled = self.fp(features), self.ec(features)["g"], self.ebc(features)
        summed = torch.segment_reduce(rows.values(), "sum", lengths=rows.lengths())
        return {"f": processed["f"], "g": summed, "h": pooled["h"]}


class Broadcasting(DataParallelWrapper):
    """torch's default: buffers of rank 0 for all."""

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        ignored = set(DistributedModelParallel._sharded_parameter_names(dmp._dmp_wrapped_module))
        inner = dmp._dmp_wrapped_module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
        dmp._dmp_wrapped_module = DistributedDataParallel(inner, process_group=env.process_group)


def _clip(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    bucket.buffer().clamp_(-1e-3, 1e-3)
    return allreduce_hook(None, bucket)


def _with_accumulation_hook(model: Any) -> None:
    weight = model.module.head.over.weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_prehook(lambda grads: tuple(grad.clamp(-1e-3, 1e-3) for grad in grads))


def _replicated(model: Any) -> None:
    replicate(model.module.head.hidden)
    replicate(model.module.head.over)


def _scaled(base: type) -> type:
    class Scaled(base):  # type: ignore[misc]
        """Like a loss scaler."""

        def _backward(self, losses: Tensor) -> None:
            super()._backward(8 * losses)

        def _optimizer_step(self) -> None:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= 8
            super()._optimizer_step()

    return Scaled


def _detached(base: type) -> type:
    class Detached(base):  # type: ignore[misc]
        def progress(self, batches: Any) -> Any:
            output = super().progress(batches)
            self.detach()
            return output

    return Detached


def _read_late(base: type) -> type:
    class ReadLate(base):  # type: ignore[misc]
        """Reads the output of the step before, when rows of others are in its memory."""

        before: Any = None

        def progress(self, batches: Any) -> Any:
            before, self.before = self.before, super().progress(batches)
            if before is None:
                return ()
            out, aside, pooled = before
            return out, aside["f"] + 0, pooled["h"] + 0

    return ReadLate


def _backward_by_hand(base: type) -> type:
    class BackwardByHand(base):  # type: ignore[misc]
        """Trains from the loss that evaluation returns."""

        def progress(self, batches: Any) -> Any:
            self._optimizer.zero_grad()
            loss = super().progress(batches)
            loss.backward()
            self._optimizer.step()
            return loss.detach()

    return BackwardByHand


def _in_two_parts(base: type) -> type:
    class InTwoParts(base):  # type: ignore[misc]
        """Gets the batches by two iterators; what the first leaves in flight waits for the next."""

        part: Any = None

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, execute_all_batches=False, **options)

        def progress(self, batches: Any) -> Any:
            self.part = self.part or islice(batches, 3)
            try:
                return super().progress(self.part)
            except StopIteration:
                if self.part is batches:
                    raise
                self.part = batches
                return super().progress(batches)

    return InTwoParts


def _injected(path: str, finder: Any, where: InjectionTargetType) -> Callable[[type], type]:
    def make(base: type) -> type:
        class Injected(base):  # type: ignore[misc]
            """Halves the dense optimizer's rate in every backward."""

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                site = InjectionSite(fqn=path, tensor_finder=finder, target_type=where)
                self.register_backward_hook(site, self.work)

            @staticmethod
            def work(pipeline: Any) -> None:
                pipeline._optimizer.param_groups[0]["lr"] /= 2

        return Injected

    return make


class _Zeroing(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def _decaying(kind: type[torch.optim.SGD]) -> Callable[[Any], torch.optim.Optimizer]:
    def make(model: Any) -> torch.optim.Optimizer:
        (group,) = dense_optimizer(model).param_groups
        return kind(group["params"], lr=0.1, momentum=0.9, weight_decay=0.1)

    return make


@dataclass
class _WithPrior(Batch):
    """Takes along what is no tensor of samples."""

    prior: Any = None

    def to(self, device: torch.device, non_blocking: bool = False) -> _WithPrior:
        return self


def _with_prior(prior: Any) -> Callable[[int, int], Batch]:
    return lambda rank, step: _WithPrior(**vars(batch_of(rank, step, SAMPLES)), prior=prior)


def _weighed(rank: int, step: int) -> Batch:
    batch: Any = _WithPrior(**vars(batch_of(rank, step, SAMPLES)))
    batch.sample_weight = 1 + 4 * (batch.labels > 0.5).float()
    return batch


def _warm_up(model: Any, step: int) -> None:
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.02 * (step + 1)


def _evaluated(*steps: int) -> Callable[[Any, int], None]:
    return lambda model, step: model.train(step not in steps)


ONCE = "computed once per batch, of its exchange only that of ids is hidden: "
INTERLEAVED = "ebc: interleaved"
PROGRAMS = {
    "processed": Program(
        model=_Processed,
        in_summary=[
            f"fp: {ONCE}it is a ShardedFeatureProcessedEmbeddingBagCollection, with TorchRec's "
            "exchange",
            INTERLEAVED,
        ],
        numbers=(1, 3, None),
    ),
    "sequences": Program(
        model=_Sequences,
        in_summary=[f"ec: {ONCE}it is a ShardedEmbeddingCollection, with TorchRec's exchange"],
        numbers=(1, 3, None),
    ),
    "frozen": Program(
        model=_Frozen, in_summary=["still: interleaved", "off: interleaved"], numbers=(1, 3, None)
    ),
    "frozen stock tables": Program(model=_Frozen, stock=["t_f", "t_g"], numbers=(1, 3, None)),
    "changed": Program(
        model=_Changed,
        in_summary=[
            "changed: not pipelined: its input is not read off the batch but made inside the model",
            INTERLEAVED,
        ],
        numbers=(1, None),
    ),
    "without wrapper": Program(is_inside=True, in_summary=[INTERLEAVED], numbers=(1, 3, None)),
    "not data parallel": Program(is_wrapped=False, in_summary=[INTERLEAVED], numbers=(1, 3, None)),
    "no loss in evaluation": Program(
        head=QUIET,
        before_step=lambda model, step: model.train(step != STEPS - 1),
        numbers=(1, 3, None),
    ),
    "as it is": Program(numbers=(None, 1, 4)),
    "communication hook": Program(
        prepare=lambda model: model._dmp_wrapped_module.register_comm_hook(None, _clip)
    ),
    "half precision sums": Program(
        wrapper=lambda: DefaultDataParallelWrapper(allreduce_comm_precision="fp16")
    ),
    "layer used twice behind checkpoints": Program(head=Siamese),
    "buffers of rank 0": Program(
        head=Normed, wrapper=Broadcasting, refusal="head.norm is a BatchNorm1d"
    ),
    "hook on the model": Program(
        prepare=lambda model: model.register_forward_hook(
            lambda module, args, output: (2 * output[0], output[1])
        ),
        refusal="a hook is registered on the Distributed",
    ),
    "hook on a gradient": Program(
        prepare=lambda model: model.module.head.over.weight.register_hook(
            lambda grad: grad.clamp(-1e-3, 1e-3)
        ),
        refusal="a gradient hook is registered on parameter",
    ),
    "hook on a gradient's accumulation": Program(
        prepare=_with_accumulation_hook, refusal="a gradient hook is registered on"
    ),
    "sparse gradients": Program(
        head=SparseGradients, refusal="DistributedDataParallel reduces sparse gradients"
    ),
    "loss scaler": Program(pipeline=_scaled, refusal="Scaled overrides _backward"),
    "replicate()": Program(
        prepare=_replicated, is_wrapped=False, refusal="replicate() was applied to"
    ),
    "work in the backward of a layer": Program(
        pipeline=_injected("head.over", FirstGradTensorFinder(), InjectionTargetType.ACTIVATION),
        refusal="register_backward_hook injected work into head.over",
    ),
    "work in the backward of a weight": Program(
        pipeline=_injected("head.over", FirstGradTensorFinder(), InjectionTargetType.PARAM_GRAD),
        refusal="a gradient hook is registered on parameter head.over.bias",
    ),
    "work in the backward of tables": Program(
        pipeline=_injected(
            "ebc",
            OutputDistTensorFinder(sharding_type=ShardingType.TABLE_WISE),
            InjectionTargetType.ACTIVATION,
        ),
        numbers=(None, 1, 4),
        refused=(None, 1, 4),
        refusal="register_backward_hook: 'ebc' has hot/cold tables",
    ),
    "optimizer in backward": Program(
        head=InBackward, fails=True, refusal="dense parameters have optimizers that step in"
    ),
    "loss without a graph": Program(
        head=NO_GRAPH, fails=True, refusal="grad_fn. Micro-batches cannot be compared with it"
    ),
    "unused parameters of a static graph": Program(head=Unused, optimizer=_decaying(_Zeroing)),
    "unused parameters": Program(
        head=UsedByOne,
        optimizer=_decaying(torch.optim.SGD),
        wrapper=lambda: DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
        refusal="DistributedDataParallel looks for unused parameters",
    ),
    "a loss of weights, no samples on a rank": Program(
        head=Regular,
        batch=lambda rank, step: batch_of(rank, step, 0 if rank and step % 2 else SAMPLES),
    ),
    "two stock collections, one sample on a rank": Program(
        model=_Apart,
        batch=lambda rank, step: batch_of(rank, step, 1 if rank and step % 2 else SAMPLES),
    ),
    "warm-up": Program(before_step=_warm_up),
    "warm-up of stock tables": Program(before_step=_warm_up, stock=["t_f"], numbers=(None, 1, 4)),
    "autocast": Program(
        within=lambda: torch.autocast("cpu", dtype=torch.bfloat16), tolerance=BFLOAT16
    ),
    "metric in evaluation": Program(head=METRIC, before_step=_evaluated(2, 3)),
    "metric in evaluation first": Program(head=METRIC, before_step=_evaluated(0, 1), planned=4),
    "small last batch": Program(
        head=Squeezed,
        batch=lambda rank, step: batch_of(rank, step, 7 if step == STEPS - 1 else SAMPLES),
    ),
    "dropout": Program(head=DROPPING, prepare=lambda model: torch.manual_seed(5), numbers=(1,)),
    "default of double": Program(head=Double, within=lambda: default_dtype(torch.float64)),
    "detached after each step": Program(
        head=Normed, pipeline=_detached, refusal="head.norm is a BatchNorm1d"
    ),
    "batches in two parts": Program(pipeline=_in_two_parts),
    "output that is read late": Program(model=_Returned, pipeline=_read_late, numbers=(None, 1, 4)),
    "backward in evaluation": Program(
        head=changed(output=lambda head, out, batch: Head.loss(head, out, batch)),
        pipeline=_backward_by_hand,
        before_step=_evaluated(*range(STEPS)),
        refusal="ebc: a backward outside of the one of a training step reaches its tables",
        refused=(None, 4),
    ),
    "tensor without samples": Program(
        head=PRIOR, batch=_with_prior(torch.tensor([0.5, 2.0])), planned=4
    ),
    "array without samples": Program(
        head=PRIOR, batch=_with_prior(np.array([0.5, 2.0])), planned=4
    ),
    "attribute of a batch": Program(head=WEIGHING, batch=_weighed),
    "ratio of sums": Program(head=Ratio, options={"loss_reduction": "ratio"}),
}


@cases_of(PROGRAMS)
def test_a_program_trains_as_under_torchrec(name: str, num_micro_batches: int | None) -> None:
    assert_as_stock(__name__, name, num_micro_batches)
