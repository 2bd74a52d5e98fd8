"""A DIN-like model for variants: sequences of clicks beside profiles, tables and bags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.fields.question import Question
from benchmarks.fields.workload import ModelTable
from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.data.alimama import generate_alimama
from torchrec_picasso.app.zoo.data.click_files import read_clicks
from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of
from torchrec_picasso.app.zoo.data.shares import HELDOUT, TRAIN, Shares
from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroup, FeatureGroups
from torchrec_picasso.app.zoo.models.din import DIN

_PROFILE_DIM, _TABLE_LR = 16, 0.02
_NUM_DENSE = 1  # of zeros: clicks have no dense features
_ATTENTION_HIDDEN, _HIDDEN = 16, (64,)


class SequencesWorkload:
    """Clicks with histories.

    Args:
        question: File of real rows (``None`` = generated ones), cap on rows, columns of sequences.
    """

    def __init__(self, question: Question) -> None:
        clicks = (
            generate_alimama(question.seed) if question.data is None else read_clicks(question.data)
        )
        self._clicks: Clicks = clicks.hashed(question.max_rows)
        self._path, self._dim = question.data, question.dim
        self._seed = question.seed
        self._shares = Shares(
            num_samples=len(clicks),
            in_time_order=clicks.in_time_order,
            batch_size=question.batch_size,
            world_size=question.hosts,
            seed=question.seed,
            start=len(clicks) // 2,
        )

    @property
    def tables(self) -> Sequence[ModelTable]:
        """All tables, in the model's order."""
        clicks = self._clicks
        sequences = [
            ModelTable(
                name=f"t_{target}",
                module=f"embeddings.collections.target_{self._dim}",
                num_embeddings=clicks.num_rows(target),
                dim=self._dim,
                ids_per_sample=1 + float(np.mean(history.lengths_n)),
            )
            for target, history in clicks.histories.items()
        ]
        profiles = [
            ModelTable(
                name=f"t_{name}",
                module="embeddings.collections.profile",
                num_embeddings=clicks.num_rows(name),
                dim=_PROFILE_DIM,
                ids_per_sample=1,
            )
            for name in clicks.profiles
        ]
        return [*sequences, *profiles]

    def model(self) -> ClickModel:
        """The model before sharding, row-wise Adagrad fused into its tables."""
        train = build_din(self._clicks, self._dim, _PROFILE_DIM, self._seed)
        parameters = train.embeddings.parameters()
        apply_optimizer_in_backward(RowWiseAdagrad, parameters, {"lr": _TABLE_LR})
        return train

    def training(self, rank: int, num_batches: int) -> list[Batch]:
        """One rank's batches."""
        return [self._batch(TRAIN, rank, step) for step in range(num_batches)]

    def heldout(self, world_size: int, num_steps: int) -> Iterator[Batch]:
        """All ranks' batches that hot rows are chosen from.

        Samples without an order are drawn again from the same ones.
        """
        return (
            self._batch(HELDOUT, rank, step)
            for step in range(num_steps)
            for rank in range(world_size)
        )

    def in_words(self) -> str:
        """Description of the workload, for the head of a report."""
        origin = "generated clicks" if self._path is None else self._path
        order = " in time order" if self._clicks.in_time_order else ""
        history = next(iter(self._clicks.histories.values()))
        mean = float(np.mean(history.lengths_n))
        return f"{origin}{order}, histories of {mean:.1f} clicks on average"

    def _batch(self, stream: int, rank: int, step: int) -> Batch:
        return self._clicks.batch(self._shares.samples(stream, rank, step))


def build_din(
    clicks: Clicks, sequence_dim: int = 16, profile_dim: int = 8, seed: int = 0
) -> ClickModel:
    """Builds a small DIN with its loss and smooth activations, tables on the meta device.

    The paper's PReLU and Dice have kinks: there, sums in another order give another gradient, and
    equal trainings would not give equal weights.

    The table of a column is ``t_<column>``, with ``sequence_dim`` columns for targets and histories
    and ``profile_dim`` for others; ``seed`` initialises the dense weights.
    """
    targets, profiles = tuple(clicks.targets), tuple(clicks.profiles)
    histories = tuple(map(history_of, targets))
    target_dims = (sequence_dim,) * len(targets)
    groups = [
        FeatureGroup(name="target", columns=targets, dims=target_dims),
        FeatureGroup(
            name="history", columns=histories, dims=target_dims, kind=SEQUENCE, tables_of="target"
        ),
        FeatureGroup(name="profile", columns=profiles, dims=(profile_dim,) * len(profiles)),
    ]
    num_rows = {column: clicks.num_rows(column) for column in (*targets, *profiles)}
    num_rows |= {history_of(target): num_rows[target] for target in targets}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        embeddings = FeatureGroups(groups, num_rows)
        head = DIN(embeddings, _NUM_DENSE, _ATTENTION_HIDDEN, _HIDDEN, "tanh")
        return ClickModel(embeddings, head)
