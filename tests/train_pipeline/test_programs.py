"""What a program does around its model happens as under TorchRec's pipeline, or is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper

from tests.train_pipeline.programs import (
    BFLOAT16,
    SAMPLES,
    STEPS,
    WIDTH,
    Head,
    Program,
    assert_as_stock,
    cases_of,
)
from tests.train_pipeline.stock_models import Stock, batch_of
from torchrec_picasso.batches.split import split_batch


class Siamese(Head):
    """A layer used twice behind reentrant checkpoints: each weight gets two gradients."""

    def tower(self, x: Tensor) -> Tensor:
        both = [checkpoint(self._hidden, part, use_reentrant=True) for part in (x, x.flip(1))]
        return self.over(both[0] - both[1])

    def _hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(x))


class Normed(Head):
    """Statistics of batches, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(self.norm(self.hidden(x)))


class SparseGradients(Head):
    """A table of the dense part whose gradients are sparse."""

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


class Metric(Head):
    """A number about the whole batch that it gives in evaluation only."""

    def output(self, out: Tensor, batch: Batch) -> Any:
        return out.detach() if self.training else out.detach().median()


class Squeezed(Head):
    """A squeeze that takes the dim of a single sample away."""

    def logits(self, x: Tensor) -> Tensor:
        return self.tower(x).squeeze()

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        return functional.binary_cross_entropy_with_logits(out, batch.labels)


class Ratio(Head):
    """Weighted losses over weights, two of them."""

    def loss(self, out: Tensor, batch: Batch) -> Any:
        errors, weights = (out - batch.labels) ** 2, batch.dense_features[:, 0]
        sums = torch.stack([(errors * weights).sum(), errors.abs().sum()])
        totals = torch.stack([weights.sum(), batch.labels.sum()])
        return (sums, totals) if self.is_ours else sums / totals


class Broadcasting(DataParallelWrapper):
    """As torch wraps by default: with buffers of rank 0 for all."""

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        ignored = set(DistributedModelParallel._sharded_parameter_names(dmp._dmp_wrapped_module))
        inner = dmp._dmp_wrapped_module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
        dmp._dmp_wrapped_module = DistributedDataParallel(inner, process_group=env.process_group)


def _clip(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    bucket.buffer().clamp_(-1e-3, 1e-3)
    return allreduce_hook(None, bucket)


def _with_comm_hook(model: Any) -> None:
    model._dmp_wrapped_module.register_comm_hook(None, _clip)


def _with_model_hook(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: (2 * output[0], output[1]))


def _with_gradient_hook(model: Any) -> None:
    model.module.head.over.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def _with_accumulation_hook(model: Any) -> None:
    weight = model.module.head.over.weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_prehook(lambda grads: tuple(grad.clamp(-1e-3, 1e-3) for grad in grads))


def _replicated(model: Any) -> None:
    replicate(model.module.head.hidden)
    replicate(model.module.head.over)


def _scaled(base: type) -> type:
    class Scaled(base):  # type: ignore[misc]
        """As a loss scaler does it."""

        def _backward(self, losses: Tensor) -> None:
            super()._backward(8 * losses)

        def _optimizer_step(self) -> None:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= 8
            super()._optimizer_step()

    return Scaled


def _empty_on_one(rank: int, step: int) -> Batch:
    batch = batch_of(rank, step, SAMPLES)
    return split_batch(batch, [0, SAMPLES])[0] if rank and step % 2 else batch


def _small_last(rank: int, step: int) -> Batch:
    return batch_of(rank, step, 7 if step == STEPS - 1 else SAMPLES)


def _warm_up(model: Any, step: int) -> None:
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.02 * (step + 1)


def _evaluated(model: Any, step: int) -> None:
    model.train(step not in (2, 3))


PROGRAMS = {
    "as it is": Program(),
    "communication hook": Program(prepare=_with_comm_hook),
    "half precision sums": Program(
        wrapper=lambda: DefaultDataParallelWrapper(allreduce_comm_precision="fp16")
    ),
    "layer used twice behind checkpoints": Program(head=Siamese),
    "buffers of rank 0": Program(
        head=Normed, wrapper=Broadcasting, refusal="head.norm is a BatchNorm1d"
    ),
    "hook on the model": Program(
        prepare=_with_model_hook, refusal="a hook is registered on the Distributed"
    ),
    "hook on a gradient": Program(
        prepare=_with_gradient_hook, refusal="a gradient hook is registered on parameter"
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
    "unused parameters": Program(
        wrapper=lambda: DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
        refusal="DistributedDataParallel looks for unused parameters",
    ),
    "a loss of weights, no samples on a rank": Program(head=Regular, batch=_empty_on_one),
    "warm-up": Program(before_step=_warm_up),
    "warm-up of stock tables": Program(
        before_step=_warm_up, stock=[Stock("ebc", frozenset({"t_f"}))]
    ),
    "autocast": Program(
        within=lambda: torch.autocast("cpu", dtype=torch.bfloat16), tolerance=BFLOAT16
    ),
    "metric in evaluation": Program(head=Metric, before_step=_evaluated),
    "small last batch": Program(head=Squeezed, batch=_small_last),
    "ratio of sums": Program(head=Ratio, options={"loss_reduction": "ratio"}),
}


@cases_of(PROGRAMS)
def test_a_program_trains_as_under_torchrec(name: str, num_micro_batches: int | None) -> None:
    assert_as_stock(__name__, name, num_micro_batches)
