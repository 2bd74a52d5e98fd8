"""The DIN-like model for contestants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchrec.datasets.utils import Batch

from benchmarks.fields.workload import ModelTable
from benchmarks.sequences.batches import draw_batch
from benchmarks.sequences.clicks import HISTORIES, PROFILES, Clicks, generate_clicks, read_clicks
from benchmarks.sequences.model import PROFILE_DIM, SEQUENCE_DIM, SequencesModel, build_model

__all__ = ["SequencesWorkload"]

_TRAIN, _HELDOUT = 0, 1


class SequencesWorkload:
    """Clicks with histories.

    Args:
        path: Of real rows; ``None`` = generated ones.
        batch_size: Samples per rank and step.
        seed: Draws batches, dense weights and generated rows.
        max_rows: Most rows of a table; larger ids are taken modulo this.
    """

    def __init__(self, path: str | None, batch_size: int, seed: int, max_rows: int) -> None:
        clicks = generate_clicks(seed) if path is None else read_clicks(path)
        self._clicks: Clicks = clicks.hashed(max_rows)
        self._path = path
        self._batch_size = batch_size
        self._seed = seed

    @property
    def tables(self) -> Sequence[ModelTable]:
        """All tables, in the model's order."""
        clicks = self._clicks
        return [
            *(
                ModelTable(
                    name=f"t_{target}",
                    module="sequences",
                    num_embeddings=clicks.num_rows(target),
                    dim=SEQUENCE_DIM,
                    ids_per_sample=1 + self._mean_length(history),
                )
                for target, history in HISTORIES.items()
            ),
            *(
                ModelTable(
                    name=f"t_{name}",
                    module="profiles",
                    num_embeddings=clicks.num_rows(name),
                    dim=PROFILE_DIM,
                    ids_per_sample=1,
                )
                for name in PROFILES
            ),
        ]

    def model(self) -> SequencesModel:
        """The model before sharding."""
        return build_model(self._clicks, self._seed)

    def training(self, rank: int, num_batches: int) -> list[Batch]:
        """One rank's batches."""
        return [self._batch(_TRAIN, rank, step) for step in range(num_batches)]

    def heldout(self, world_size: int, num_steps: int) -> Iterator[Batch]:
        """All ranks' batches that hot rows are chosen from; of the same samples, drawn anew."""
        return (
            self._batch(_HELDOUT, rank, step)
            for step in range(num_steps)
            for rank in range(world_size)
        )

    def in_words(self) -> str:
        """What is trained, for the head of a report."""
        of = "generated clicks" if self._path is None else self._path
        mean = self._mean_length(HISTORIES["cate_id"])
        return f"{of}, histories of {mean:.1f} clicks on average"

    def _batch(self, stream: int, rank: int, step: int) -> Batch:
        return draw_batch(self._clicks, self._batch_size, [self._seed, stream, rank, step])

    def _mean_length(self, history: str) -> float:
        lists = self._clicks.history[history]
        return sum(of.size for of in lists) / len(lists)
