"""A model that is attached to the pipeline: its sharded modules, by the way they are run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_picasso._torchrec import (
    TrainPipelineContext,
    detach_model,
    override_input_dist_forwards,
    rewrite_model,
    start_data_dist,
    use_context_for_postprocs,
)
from torchrec_picasso.batches.feed import IdStream
from torchrec_picasso.batches.split import SPLIT_ADVICE, count_samples, split_output
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import Agreement, agree_on
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.proof.dense_part import without_a_trace
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch
from torchrec_picasso.train_pipeline.made_ahead import MadeAhead
from torchrec_picasso.train_pipeline.model_parts import (
    as_scheduled,
    inner_model,
    process_group_of,
    unpipelined_modules,
    why_computed_once,
    why_whole_batches,
)
from torchrec_picasso.train_pipeline.module_group import ModuleGroup, group_modules
from torchrec_picasso.train_pipeline.preparation import Preparation
from torchrec_picasso.train_pipeline.rewrite import (
    InterleavedForward,
    explained_tracing,
    held_warnings,
)

_VBE_BATCH = (
    "its KeyedJaggedTensor has a batch size per feature (variable batch), or another one than the "
    "batch"
)


@dataclass(frozen=True)
class FirstBatchFacts:
    """Facts about the first batch, equal on all ranks."""

    vbe: Collection[str] = ()
    """Modules with variable-batch (VBE) features."""
    num_samples: int = 0
    """Samples of the largest batch of a rank."""
    weighted: Collection[str] = ()
    """Modules whose features have per-sample weights."""
    why_whole: str | None = None
    """Reason why batches cannot be cut; ``None`` = none is known."""


class PipelinedModel:
    """Replaces the forwards of the sharded modules; TorchRec's ``detach`` restores them. TorchRec's
    tracer may examine the first batch. CompatError if the model cannot be traced."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        context: TrainPipelineContext,
        id_stream: IdStream,
        device: torch.device,
        pipeline_postproc: bool,
    ) -> None:
        self.device, self.pg = device, process_group_of(model)
        self.id_stream = id_stream
        self.inner = inner_model(model)
        """The model inside its wrapper."""
        refused, differs = self._rewrite(model, batch, context, pipeline_postproc)
        self._unpipelined = unpipelined_modules(self.inner, self.pipelined, refused)
        self._dist_forwards: dict[str, list[Callable[..., Any]]] = {}
        """Input dist forwards of the plain modules, before their splits were joined."""
        self.interleaved: dict[str, Any] = {}
        """Interleaved modules, whose exchange a schedule drives, by name."""
        self.plain: dict[str, Any] = {}
        """Non-interleaved modules, computed once per batch, by name."""
        self._why_plain: dict[str, str] = {}
        self._named = [(module.forward.name, module) for module in self.pipelined]
        for name, module in self._named:
            self._sort_in(name, module)
        self.first_batch = FirstBatchFacts()
        """Facts about the first batch; set by :meth:`examine_first_batch`."""
        self.groups: Sequence[ModuleGroup] = ()
        """The interleaved modules by common exchange; set by :meth:`examine_first_batch`."""
        self.preparation = Preparation.build(self.interleaved)
        """Reads ids in a data loader, for one micro-batch."""
        self.num_prepared = [0, 0]
        """Exchanges of prepared batches whose ids the step read again, and those that used them."""
        if differs is not None:
            self.release()
            raise CompatError(differs)

    def _rewrite(
        self, model: nn.Module, batch: Any, context: TrainPipelineContext, pipeline_postproc: bool
    ) -> tuple[dict[str, str], str | None]:
        """Replaces the forwards of modules that read their input off the batch, as TorchRec does,
        and of those whose input is made ahead.

        Returns why other modules, whose input the model makes, have their own forward, by name; and
        why ranks cannot go on with the model. Collective if there is a batch.
        """
        device, id_stream = self.device, self.id_stream
        # the tracer runs the forward with proxies, which may change the model's own state
        with without_a_trace(self.inner, device), explained_tracing(), held_warnings() as held:
            found = rewrite_model(
                model=model,
                context=context,
                dist_stream=id_stream.stream,
                default_stream=torch.get_device_module(device).current_stream(),
                batch=batch,
                apply_jit=False,
                pipelined_forward=InterleavedForward,
                pipeline_postproc=pipeline_postproc,
            )
            self.pipelined, _, self._original_forwards, self.postproc_modules, made_inside = found
            self.made_ahead = MadeAhead(self.inner, made_inside)
            """Inputs that the model makes between the batch and its tables."""
            differs = None if batch is None else self._why_ranks_differ(made_inside)
            if batch is not None and differs is None:
                with id_stream.working():
                    id_stream.take_batch(batch)
                    self.made_ahead.examine(batch, self.pg, device)
        for name in self.made_ahead.names:  # as TorchRec pipelines the others
            module: Any = self.inner.get_submodule(name)
            arguments = self.made_ahead.arguments(name)
            self._original_forwards.append(module.forward)
            self.pipelined.append(module)
            module.is_pipelined = True
            module.forward = InterleavedForward(name, arguments, module, context, id_stream.stream)
            module.forward.check = partial(self.made_ahead.check, name)
        # TorchRec warns of the modules that it leaves out; not if all of them are made ahead
        if set(made_inside) - set(self.made_ahead.names) or not made_inside:
            for record in held:
                logging.getLogger(record.name).handle(record)
        return {name: self.made_ahead.refused.get(name, "") for name in made_inside}, differs

    def _why_ranks_differ(self, made_inside: Sequence[str]) -> str | None:
        """Names the modules in question, if tracing has found other ones on another rank.
        Collective."""
        found = [module.forward.name for module in self.pipelined], list(made_inside)
        digests = Agreement(self.pg, self.device, [crc32(repr(found).encode())]).wait()
        if all(digest == digests[0] for digest in digests):
            return None
        return agree_on(
            self.pg,
            self.device,
            f"the model's forward differs by rank: on rank {self.pg.rank()} it reads the input of "
            f"{found[0]} off the batch and makes that of {found[1]}; let all ranks run the same",
        )

    def _sort_in(self, name: str, module: Any) -> None:
        """Adds a module to the interleaved or to the plain ones, or its two parts to both."""
        scheduled = as_scheduled(module)
        if scheduled is not None:
            self.interleaved[name] = scheduled
            return
        plain, why = module, why_computed_once(module)
        if isinstance(module, HotColdModule) and module.has_hot_cold:
            self.interleaved[name], plain = module.split_by_kind()
            hot_cold, name = name, f"{name} (stock tables)"
            parts = {hot_cold: self.interleaved[hot_cold], name: plain}
            module.forward.take_apart(parts, module.join)
        self.plain[name], self._why_plain[name] = plain, why

    @property
    def modules(self) -> Mapping[str, Any]:
        """All pipelined modules by name."""
        return {**self.interleaved, **self.plain}

    @property
    def num_waves(self) -> int:
        """The largest number of waves that the plan gives a group's packs."""
        return max((len(group.row_group.plan.waves) for group in self.groups), default=1)

    @property
    def shares_rows(self) -> bool:
        """Whether micro-batches of any group use the same rows."""
        return any(route.shares_rows for group in self.groups for route in group.row_group.routes)

    @property
    def planned_micro_batches(self) -> int | None:
        """Number of micro-batches that the plan was priced for; ``None`` = not in the plan."""
        for module in self.interleaved.values():
            for placed in getattr(module, "module_sharding_plan", {}).values():
                if isinstance(placed.cache_params, HotColdParams):
                    return placed.cache_params.num_micro_batches
        return None

    def read(
        self, batch: Any, context: TrainPipelineContext
    ) -> tuple[Mapping[str, KeyedJaggedTensor], int]:
        """Reads each interleaved module's features off a batch, and the number of samples.

        CompatError, on this rank alone, if features cannot be served, if the input of any module,
        also a plain one, cannot be made ahead, or if features have their own batch sizes (VBE),
        unlike those of the first batch.
        """
        with self._reading_in(context):
            for name in self.made_ahead.names:
                self.made_ahead.input_of(name, batch)
        features_of, num_samples, vbe = self._examined(batch, context)
        for name in vbe:
            if name not in self.first_batch.vbe:
                raise CompatError(
                    f"{name}: {_VBE_BATCH}, and the first batch had not; give the pipeline such a "
                    "batch first, or use TorchRec's TrainPipelineSparseDist"
                )
        for group in self.groups:
            group.check(features_of)
        return features_of, num_samples

    def _examined(
        self, batch: Any, context: TrainPipelineContext
    ) -> tuple[Mapping[str, KeyedJaggedTensor], int, list[str]]:
        """Finds the modules' features, the number of samples (1 if unknown), and VBE modules, whose
        features have another number of samples, or a batch size each."""
        features_of = self._features_of(self.interleaved, batch, context)
        strides = {
            name: None if features.variable_stride_per_key() else features.stride()
            for name, features in features_of.items()
        }
        counts = (count_samples(batch), *strides.values())
        num_samples = next((count for count in counts if count is not None), 1)
        vbe = [name for name, stride in strides.items() if stride != num_samples]
        return features_of, num_samples, vbe

    def release(self) -> None:
        """Restores the model's own forwards."""
        originals = self._original_forwards, self._original_dist_forwards, self.postproc_modules
        detach_model(self.inner, self.pipelined, *originals)
        for module in self.pipelined:  # TorchRec leaves its mark, by which processors act
            module.is_pipelined = False

    @property
    def num_changes(self) -> int:
        """Number of updates of all packs, and of writes taken over, by any driver of the tables."""
        return sum(group.row_group.num_changes for group in self.groups)

    def check_forwards(self) -> None:
        """Refuses a model whose forwards another pipeline has replaced.

        Raises CompatError on all ranks alike.
        """
        for name, module in self._named:
            if not isinstance(module.forward, InterleavedForward):
                raise CompatError(
                    f"{name}: another pipeline has replaced its forward; call detach() of this "
                    "pipeline before the other one, and detach() of the other one after it"
                )

    def examine_first_batch(
        self, batch: Any, context: TrainPipelineContext, known: FirstBatchFacts | None = None
    ) -> None:
        """Groups the modules that can travel together, by the facts about the first batch.
        Collective, unless the facts are known: those of the batches in flight."""
        self.first_batch = known or self._collected(batch, context)
        self.groups = group_modules(
            self.interleaved, self.first_batch.weighted, self.first_batch.vbe
        )

    def _collected(self, batch: Any, context: TrainPipelineContext) -> FirstBatchFacts:
        """Collects the facts about all ranks' first batches. Collective."""
        with self.id_stream.working():
            self.id_stream.take_batch(batch)
            features_of, num_samples, vbe = self._examined(batch, context)
            # one vector for one all-reduce: a flag per module (VBE), a flag per module (weights),
            # samples, and a flag for a batch without countable samples; the maximum joins each
            own = [int(name in vbe) for name in features_of]
            own += [int(each.weights_or_none() is not None) for each in features_of.values()]
            own += [num_samples, int(count_samples(batch) is None)]
            most = torch.tensor(own, device=self.device)
            if self.pg.size() > 1:
                dist.all_reduce(most, dist.ReduceOp.MAX, group=self.pg)
            *flags, most_samples, is_uncounted = most.tolist()
        names = list(compress(features_of, flags[: len(features_of)]))
        weighted = list(compress(features_of, flags[len(features_of) :]))
        why_whole = None
        if names:
            why_whole = (
                f"{', '.join(names)}: {_VBE_BATCH}, so samples cannot be cut into micro-batches; "
                "use num_micro_batches=1, or the same batch size for all features"
            )
        elif is_uncounted:
            why_whole = (
                f"a {type(batch).__name__} has no samples that can be counted, so it cannot be cut "
                "into micro-batches; use num_micro_batches=1, or keep tensors in its attributes "
                f"and {SPLIT_ADVICE}"
            )
        return FirstBatchFacts(names, most_samples, weighted, why_whole)

    def why_whole_batches(self) -> str | None:
        """Reason why batches cannot be cut, as far as first batch and model show; or ``None``."""
        return self.first_batch.why_whole or why_whole_batches(self.inner, self._unpipelined)

    def start_plain(self, inflight: InFlightBatch) -> None:
        """Starts the input dists of the plain modules, on the ids' stream. Collective."""
        with self._reading_in(inflight.context):
            start_data_dist(list(self.plain.values()), inflight.batch, inflight.context)
        self.join_splits()

    def postprocs_for_part(
        self,
        context: TrainPipelineContext,
        sizes: Sequence[int],
        part_of: Callable[[Sequence[Any]], Any],
    ) -> AbstractContextManager[None]:
        """In this context, modules that run ahead of the model ("postprocs") return a micro-batch's
        part of their result for the batch. ``part_of`` makes it from pieces of these sizes."""
        if self.postproc_modules and len(sizes) > 1:
            part = TrainPipelineContext(index=context.index, version=context.version)
            ahead = {module.fqn for module in self.postproc_modules}
            for name in ahead & context.postproc_fwd_results.keys():
                result = context.postproc_fwd_results[name]
                source = f"{name} is run ahead of the model (pipeline_postproc=True) and gives"
                part.postproc_fwd_results[name] = part_of(split_output(result, sizes, source))
            context = part
        return self._reading_in(context)

    def make_parts(
        self,
        context: TrainPipelineContext,
        micro_batches: Sequence[Any],
        sizes: Sequence[int],
        is_proved: bool,
    ) -> None:
        """Makes the inputs of micro-batches that the model makes itself; CompatError if they cannot
        be made. Without a proof, they must be parts of the whole batch's."""
        ahead = self.made_ahead
        for number, micro_batch in enumerate(micro_batches if ahead.names else ()):
            with self.postprocs_for_part(context, sizes, itemgetter(number)):
                ahead.make_part(context, micro_batch, number)
        if not is_proved:
            ahead.check_parts(context, sizes)

    def looked_up(
        self, groups: Iterable[Sequence[str]], inflight: InFlightBatch
    ) -> Mapping[str, KeyedJaggedTensor]:
        """Returns what modules look up for a batch, by name, of those whose lookups are in groups
        of :attr:`.Proof.equal_rows`."""
        names = tuple(name for group in groups for name in group)
        modules = {
            name: module
            for name, module in self.modules.items()
            if any(rows.startswith(f"{name}[") for rows in names)
        }
        return self._features_of(modules, inflight.batch, inflight.context)

    def _features_of(
        self, modules: Mapping[str, Any], batch: Any, context: TrainPipelineContext
    ) -> dict[str, KeyedJaggedTensor]:
        """Finds the features of modules, by name."""
        features_of = {}
        with self._reading_in(context):
            for name, module in modules.items():
                args, kwargs = module.forward.args.build_args_kwargs(batch)
                features_of[name] = maybe_td_to_kjt(next(iter((*args, *kwargs.values()))), None)
        return features_of

    def _reading_in(self, context: TrainPipelineContext) -> AbstractContextManager[None]:
        """In this context, postprocs and inputs that are made ahead run, or return their result."""
        users = [*self.postproc_modules, self.made_ahead]
        found: AbstractContextManager[None] = use_context_for_postprocs(users, context)
        return found

    def join_splits(self) -> None:
        """Makes the splits of TorchRec's input dists travel in one message, once these exist."""
        inside = [each for module in self.plain.values() for each in module.modules()]
        made = not any(getattr(each, "_has_uninitialized_input_dist", False) for each in inside)
        if made and not self._dist_forwards:
            named = self.plain.items()
            self._dist_forwards = {name: override_input_dist_forwards([m]) for name, m in named}

    @property
    def _original_dist_forwards(self) -> list[Callable[..., Any]]:
        """The forwards that TorchRec's ``detach`` restores, in the order of its input dists. The
        two modules of a split module have their own input dists, which ``detach`` does not see."""
        known = self._dist_forwards
        by_module = [known.get(name, _dist_forwards(module)) for name, module in self._named]
        return [forward for forwards in by_module for forward in forwards]

    def lines(self) -> list[str]:
        """Describes each module and the way it is run, one line per module."""
        named = [(group, name) for group in self.groups for name in group.modules]
        lines = [f"{name}: interleaved{_how(group, name)}" for group, name in named]
        once = "computed once per batch, of its exchange only that of ids is hidden"
        lines += [f"{name}: {once}: {self._why_plain[name]}" for name in self.plain]
        lines += [f"{name}: not pipelined: {why}" for name, (why, _) in self._unpipelined.items()]
        again, used = self.num_prepared
        if again or used:
            times = f"used {used} times, read again {again} times"
            lines.append(f"ids prepared by the data loader: {times}")
        return lines


def _how(group: ModuleGroup, name: str) -> str:
    others = [other for other in group.modules if other != name]
    if others:
        return f" in one exchange with {', '.join(others)}"
    rows = group.row_group
    return f" in {len(rows.plan.waves)} waves" if rows.is_staggered else ""


def _dist_forwards(module: nn.Module) -> list[Callable[..., Any]]:
    """Lists the forwards of those input dists in a module whose splits TorchRec may join."""
    found = [each for inside in module.modules() for each in getattr(inside, "_input_dists", [])]
    return [each._dist.forward for each in found if hasattr(each, "_dist")]
