"""A model that the pipeline has taken over: its sharded modules, sorted by how they are run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrec_picasso._torchrec import (
    TrainPipelineContext,
    override_input_dist_forwards,
    rewrite_model,
    start_data_dist,
)
from torchrec_picasso.batches.split import SPLIT_ADVICE, num_samples
from torchrec_picasso.comparison.model_memory import without_a_trace
from torchrec_picasso.errors import InputError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.interleaved_forward import InterleavedForward
from torchrec_picasso.train_pipeline.model_parts import (
    as_scheduled,
    has_weights,
    inner_model,
    samples_of_input,
    unpipelined_modules,
    why_computed_once,
    why_whole_batches,
)
from torchrec_picasso.train_pipeline.module_group import ModuleGroup, group_modules
from torchrec_picasso.train_pipeline.postprocs import Postprocs
from torchrec_picasso.train_pipeline.tracing import explained_tracing

__all__ = ["FirstLook", "PipelinedModel", "count_samples"]

ODD_BATCH = (
    "its KeyedJaggedTensor has a batch size per feature (variable batch), or another one than the "
    "batch"
)


@dataclass(frozen=True)
class FirstLook:
    """What the first batch tells, the same on all ranks.

    Args:
        odd: Modules whose features have other samples than the batch.
        num_samples: Of the largest batch of a rank.
        weighted: Modules whose features have per-sample weights.
        why_whole: Why batches cannot be cut; ``None`` = nothing that is known.
    """

    odd: Collection[str] = ()
    num_samples: int = 0
    weighted: Collection[str] = ()
    why_whole: str | None = None


class PipelinedModel:
    """Takes over the forwards of the sharded modules; TorchRec's ``detach`` gives them back.

    Args:
        model: As given to the pipeline.
        batch: What TorchRec's tracer may ask.
        context: Of the batch.
        stream: Where ids are made ready.
        device: Where the model runs.
        pipeline_postproc: Whether modules without parameters run ahead of the model.

    Raises:
        CompatError: If the model cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        context: TrainPipelineContext,
        *,
        stream: torch.Stream | None,
        device: torch.device,
        pipeline_postproc: bool,
    ) -> None:
        self.inner = inner_model(model)
        """The model inside its wrapper."""
        # the tracer runs the forward, with proxies
        with without_a_trace(self.inner, device), explained_tracing():
            self.pipelined, _, self.original_forwards, self.postproc_modules, changed = (
                rewrite_model(
                    model=model,
                    context=context,
                    dist_stream=stream,
                    default_stream=torch.get_device_module(device).current_stream(),
                    batch=batch,
                    apply_jit=False,
                    pipelined_forward=InterleavedForward,
                    pipeline_postproc=pipeline_postproc,
                )
            )
        self._dist_forwards: dict[str, list[Callable[..., Any]]] = {}
        """Forwards of the input dists of modules computed once, before their splits were joined."""
        self.interleaved: dict[str, Any] = {}
        """Modules whose exchange a schedule drives, by name."""
        self.groups: Sequence[ModuleGroup] = ()
        """The same, those together whose rows travel so; from :meth:`join_exchanges` on."""
        self._odd: Collection[str] = ()
        """Those whose features have other samples than the batch; from then on."""
        self.plain: dict[str, Any] = {}
        """Modules computed once per batch, by name."""
        self._why_plain: dict[str, str] = {}
        for module in self.pipelined:
            name, scheduled = module.forward.name, as_scheduled(module)
            if scheduled is not None:
                self.interleaved[name] = scheduled
            elif isinstance(module, HotColdModule) and module.has_hot_cold:
                self._take_apart(name, module)
            else:
                self.plain[name] = module
                self._why_plain[name] = why_computed_once(module)
        self._unpipelined = unpipelined_modules(self.inner, self.pipelined, changed)
        self.postprocs = Postprocs(self.postproc_modules)

    def _take_apart(self, name: str, module: HotColdModule) -> None:
        """Interleaves the hot/cold tables of a module; its stock tables are computed once."""
        forward, stock_name = module.forward, f"{name} (stock tables)"
        hot_cold, stock = module.apart()
        parts = [forward.of_part(hot_cold, name), forward.of_part(stock, stock_name)]
        forward.put_together(parts, module.join)
        self.interleaved[name], self.plain[stock_name] = hot_cold, stock
        self._why_plain[stock_name] = why_computed_once(module)

    @property
    def modules(self) -> Mapping[str, Any]:
        """All pipelined modules by name."""
        return {**self.interleaved, **self.plain}

    @property
    def num_waves(self) -> int:
        """Waves that the plan cut the packs into."""
        return max((group.num_waves for group in self.groups), default=1)

    @property
    def planned_micro_batches(self) -> int | None:
        """Micro-batches that the plan was priced for, if it says so."""
        for module in self.interleaved.values():
            for placed in getattr(module, "module_sharding_plan", {}).values():
                if isinstance(placed.cache_params, HotColdParams):
                    return placed.cache_params.num_micro_batches
        return None

    @property
    def has_stock_means(self) -> bool:
        """Whether TorchRec divides outputs after the exchange, which it cannot without samples."""
        return any(
            getattr(inner, "_has_mean_pooling_callback", False)
            for module in self.plain.values()
            for inner in module.modules()
        )

    def samples_of(self, batch: Any, context: TrainPipelineContext) -> dict[str, int | None]:
        """Of each interleaved module, how many samples its features have.

        Returns:
            ``None`` = a batch size per feature.
        """
        inputs = self._inputs_of(batch, context)
        return {name: samples_of_input(*of_module) for name, of_module in inputs.items()}

    def _inputs_of(self, batch: Any, context: TrainPipelineContext) -> dict[str, Any]:
        """Of each interleaved module, the arguments of its call."""
        with self.postprocs.of_batch(context):
            return {
                name: module.forward.args.build_args_kwargs(batch)
                for name, module in self.interleaved.items()
            }

    def count(self, batch: Any, context: TrainPipelineContext) -> int:
        """Samples of a batch: what it says or else its modules get; 1 where nobody can tell."""
        found = count_samples(batch)
        counts = self.samples_of(batch, context).values() if found is None else ()
        return next((count for count in counts if count is not None), 1) if found is None else found

    def odd_modules(self, batch: Any, context: TrainPipelineContext) -> list[str]:
        """Interleaved modules, not known as such, whose features have other samples."""
        expected = self.count(batch, context)
        counts = self.samples_of(batch, context)
        odd = [name for name, count in counts.items() if count != expected]
        return [name for name in odd if name not in self._odd]

    def look_at(
        self,
        batch: Any,
        context: TrainPipelineContext,
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> FirstLook:
        """Has all ranks see alike what their first batches allow. Collective.

        Args:
            batch: This rank's.
            context: Of the batch.
            pg: Process group.
            device: Where collectives of ``pg`` run.
        """
        odd = self.odd_modules(batch, context)
        mine = [int(name in odd) for name in self.interleaved]
        mine += [int(has_weights(*of)) for of in self._inputs_of(batch, context).values()]
        mine += [self.count(batch, context), int(count_samples(batch) is None)]
        most = torch.tensor(mine, device=device)
        if pg.size() > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=pg)
        *flags, most_samples, is_uncounted = most.tolist()
        is_odd, is_weighted = flags[: len(self.interleaved)], flags[len(self.interleaved) :]
        names = [name for name, is_it in zip(self.interleaved, is_odd) if is_it]
        weighted = [name for name, is_it in zip(self.interleaved, is_weighted) if is_it]
        why_whole = None
        if names:
            why_whole = (
                f"{', '.join(names)}: {ODD_BATCH}, so samples cannot be cut into micro-batches; "
                "use num_micro_batches=1, or the same batch size for all features"
            )
        elif is_uncounted:
            why_whole = (
                f"a {type(batch).__name__} has no samples that can be counted, so it cannot be cut "
                "into micro-batches; use num_micro_batches=1, or keep tensors in its attributes "
                f"and {SPLIT_ADVICE}"
            )
        return FirstLook(names, most_samples, weighted, why_whole)

    def join_exchanges(self, weighted: Collection[str], odd: Collection[str]) -> None:
        """Has modules travel together where they can.

        Args:
            weighted: Modules whose features have per-sample weights.
            odd: Modules whose features have other samples than the batch.
        """
        self._odd = odd
        self.groups = group_modules(self.interleaved, weighted, odd)

    def why_whole_batches(self) -> str | None:
        """Why batches cannot be cut into micro-batches, as far as the model shows it."""
        return why_whole_batches(self.inner, self._unpipelined)

    def start_plain(self, flight: Flight) -> None:
        """Starts input dists of modules computed once, as TorchRec does, on the ids' stream."""
        start_data_dist(list(self.plain.values()), flight.batch, flight.context)
        self.join_splits()

    def join_splits(self) -> None:
        """From now on the splits of TorchRec's input dists travel together, once these are made."""
        plain = list(self.plain.values())
        made = not any(
            getattr(inside, "_has_uninitialized_input_dist", False)
            for module in plain
            for inside in module.modules()
        )
        if made and not self._dist_forwards:
            self._dist_forwards = {
                name: override_input_dist_forwards([module]) for name, module in self.plain.items()
            }

    @property
    def original_dist_forwards(self) -> list[Callable[..., Any]]:
        """What TorchRec's ``detach`` gives back to the input dists it finds, in its order.

        Parts of a module have input dists of their own, which it does not find.
        """
        return [
            forward
            for module in self.pipelined
            for forward in self._dist_forwards.get(module.forward.name, _dist_forwards(module))
        ]

    def lines(self) -> list[str]:
        """A line per module."""
        return [
            *(
                f"{name}: interleaved{_how(group, name)}"
                for group in self.groups
                for name in group.modules
            ),
            *(
                f"{name}: computed once per batch, of its exchange only that of ids is hidden: "
                f"{self._why_plain[name]}"
                for name in self.plain
            ),
            *(f"{name}: not pipelined: {reason}" for name, reason in self._unpipelined.items()),
        ]


def _how(group: ModuleGroup, name: str) -> str:
    others = [other for other in group.modules if other != name]
    if others:
        return f" in one exchange with {', '.join(others)}"
    num_waves = group.rows.plan.num_row_waves
    return f" in {num_waves} waves" if num_waves > 1 else ""


def _dist_forwards(module: nn.Module) -> list[Callable[..., Any]]:
    """Forwards of the input dists in a module whose splits TorchRec may join."""
    return [
        input_dist._dist.forward
        for inside in module.modules()
        for input_dist in getattr(inside, "_input_dists", [])
        if hasattr(input_dist, "_dist")
    ]


def count_samples(batch: Any) -> int | None:
    """Samples of a batch; ``None`` = they cannot be counted."""
    try:
        return num_samples(batch)
    except InputError:
        return None
