"""The steps of a pipeline: TorchRec's pipeline runs them, or a schedule of this package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso.exchange.peers import Peers
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.in_flight_batch import GroupBatch
from torchrec_picasso.train_pipeline.model_parts import process_group_of
from torchrec_picasso.train_pipeline.preparation import Preparation


class Step(NamedTuple):
    """A step that was taken."""

    output: Any
    """The model's output beside the losses, for the whole batch."""
    num_samples: int
    """Samples of this rank's batch; 0 if they cannot be counted."""
    groups: Sequence[GroupBatch] = ()
    """The batch in each module group that was interleaved."""


class Steps(ABC):
    """Takes the steps of one model, and holds its batches in flight."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def _pg(self) -> dist.ProcessGroup:
        return process_group_of(self._model)

    @cached_property
    def peers(self) -> Peers:
        """The ranks that errors of a step name."""
        return Peers(self._pg)

    @property
    def doing(self) -> str:
        """The current operation, for messages of errors."""
        return "next batch"

    @property
    def is_settled(self) -> bool:
        """Whether all further batches have the setting of the next batch."""
        return True

    @property
    @abstractmethod
    def setting(self) -> Setting | None:
        """The setting of all further batches; ``None`` before it is chosen."""

    @abstractmethod
    def take(self, batches: Iterator[Any], pipeline: TrainPipelineSparseDist[Any, Any]) -> Step:
        """Takes a step on this rank's next batch; ``pipeline`` is the user's. Collective.

        Raises StopIteration on all ranks at once, after the last batch of any rank.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drops all batches, for a new start after an exception."""

    @abstractmethod
    def preparation(self) -> Preparation:
        """Returns a function that reads the ids of a batch ahead of its step."""

    @abstractmethod
    def summary(self) -> str:
        """Describes how each sharded module is run, line by line."""

    def release(self) -> None:  # noqa: B027, stock steps replace nothing
        """Gives the model its own forwards back, if they are replaced."""

    def begin_again(self) -> None:  # noqa: B027, stock steps examine nothing
        """Lets the next step examine the model as for the first time."""
