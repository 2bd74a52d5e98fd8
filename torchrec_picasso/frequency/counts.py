"""One table's lookup counts: of every row while that is cheap, else of frequent rows and a tail.

Exact counts are the rule: 16 bytes per row seen. A table with more rows in use than fit its budget
has a *head*, rows whose counts may lack at most ``max_undercount`` lookups, and a *tail*, exact
counts of a random sample of all its rows. Together they answer for the whole table.

Shape letters: U rows counted, V rows sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency.dependence import INDEPENDENT, Dependence
from torchrec_picasso.frequency.heavy_hitters import keep_heaviest
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.frequency.sums import sum_counts
from torchrec_picasso.frequency.tail import TailSample

__all__ = ["TableCounts"]

# A counted row stands for itself in the spectrum when it has at least this many times the most it
# may lack; rarer ones are left to the tail's sample, whose counts are exact.
_SURE_COUNT = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class TableCounts:
    """Lookups of one table.

    Args:
        num_embeddings: Rows of the table.
        feature_names: Features that look it up, in the model's order.
        rows_U: Rows counted, ascending int64, shape ``(U,)``.
        counts_U: Lookups of each, above 0, int64 (float64 once decayed), shape ``(U,)``.
        max_undercount: What a count may lack at most; 0 = all rows seen are there, with their
            exact counts. A row that is not there was looked up at most this often.
        tail: Exact counts of a sample of the rows; ``None`` where ``rows_U`` says all.
        total_lookups: Lookups of the table; ``None`` = the sum of ``counts_U``.
        feature_lookups: Lookups by feature, in the order of ``feature_names``; empty = not known.
        feature_bags: Bags (samples) by feature, empty ones included; empty = not known.
        dependence: How lookups of batches depend on each other; as if they did not where no batches
            were looked at.
    """

    num_embeddings: int
    feature_names: tuple[str, ...]
    rows_U: Tensor
    counts_U: Tensor
    max_undercount: float = 0
    tail: TailSample | None = None
    total_lookups: float | None = None
    feature_lookups: tuple[float, ...] = ()
    feature_bags: tuple[float, ...] = ()
    dependence: Dependence = INDEPENDENT

    @property
    def num_lookups(self) -> float:
        """Lookups of the table that were counted: a whole number unless decayed."""
        if self.total_lookups is not None:
            return self.total_lookups
        return self.counts_U.sum().item()

    @property
    def num_rows_seen(self) -> int:
        """Distinct rows among them; an estimate where there is a tail."""
        if self.tail is None:
            return self.rows_U.numel()
        return min(self.num_embeddings, max(self.rows_U.numel(), self.tail.num_distinct))

    @property
    def is_exact(self) -> bool:
        """Whether every row seen has its exact count."""
        return self.tail is None and not self.max_undercount

    def spectrum(self) -> CountSpectrum:
        """How many rows were looked up how often, head and tail united."""
        return self._spectrum

    @cached_property
    def _spectrum(self) -> CountSpectrum:
        if self.tail is None:
            return CountSpectrum.of(
                self.counts_U,
                self.num_embeddings,
                num_lookups=self.total_lookups,
                dependence=self.dependence,
            )
        sure_U = self.counts_U >= max(_SURE_COUNT * self.max_undercount, 1)
        head_U, rows_U = self.counts_U[sure_U], self.rows_U[sure_U]
        # sampled rows of the head: their exact counts say what the others lack on average
        place_V, is_head_V = _find(rows_U, self.tail.rows_V)
        place_V, exact_V = place_V[is_head_V], self.tail.counts_V[is_head_V].to(head_U.dtype)
        if self.max_undercount:
            lacking_V = (exact_V - head_U[place_V]).double()
            lacks = float(lacking_V.mean()) if lacking_V.numel() else self.max_undercount
            head_U = head_U + (lacks if head_U.is_floating_point() else round(lacks))
            head_U[place_V] = exact_V
        return CountSpectrum.of(
            head_U,
            self.num_embeddings,
            self.tail.counts_V[~is_head_V],
            self.tail.rows_per_sampled,
            self.num_lookups,
            self.dependence,
        )

    def pooling_factor(self, feature: str) -> float:
        """Lookups per sample of one of its features.

        Raises:
            PlanError: If the counts do not say.
        """
        if not self.feature_bags:
            raise PlanError(
                f"the statistics hold no number of samples for feature {feature!r}; collect them "
                "with FrequencyStats.collect or FrequencyStats.from_files"
            )
        place = self.feature_names.index(feature)
        bags = self.feature_bags[place]
        return self.feature_lookups[place] / bags if bags else 0.0

    def most_frequent_first(self) -> tuple[Tensor, Tensor]:
        """Rows and counts, both ``(U,)``, by count descending, then row ascending."""
        counts_U, order_U = self.counts_U.sort(descending=True, stable=True)
        return self.rows_U[order_U], counts_U

    def merge(self, other: TableCounts, max_rows_counted: int | None = None) -> TableCounts:
        """The counts of two samples of the same table; exact if both are and the rows fit.

        Args:
            other: Same table, same features.
            max_rows_counted: Rows counted one by one that the result may have; ``None`` = all.
        """
        rows_U, counts_U = sum_counts(self.rows_U, self.counts_U, other.rows_U, other.counts_U)
        tail = None
        if self.tail is not None or other.tail is not None:
            tail = self._sample().merge(other._sample())
        merged = TableCounts(
            num_embeddings=self.num_embeddings,
            feature_names=self.feature_names,
            rows_U=rows_U,
            counts_U=counts_U,
            max_undercount=self.max_undercount + other.max_undercount,
            tail=tail,
            total_lookups=None if tail is None else self.num_lookups + other.num_lookups,
            feature_lookups=_added(self.feature_lookups, other.feature_lookups),
            feature_bags=_added(self.feature_bags, other.feature_bags),
            dependence=self.dependence.mean(other.dependence, self.num_lookups, other.num_lookups),
        )
        return merged if max_rows_counted is None else merged.shrunk(max_rows_counted)

    def shrunk(self, max_rows_counted: int) -> TableCounts:
        """These counts with at most so many rows counted one by one, the most frequent ones."""
        if self.rows_U.numel() <= max_rows_counted:
            return self
        rows, counts, subtracted = keep_heaviest(
            self.rows_U.numpy(), self.counts_U.numpy(), max_rows_counted
        )
        return replace(
            self,
            rows_U=torch.from_numpy(rows),
            counts_U=torch.from_numpy(counts),
            max_undercount=self.max_undercount + subtracted,
            tail=self._sample(),
            total_lookups=self.num_lookups,
        )

    def decayed(self, factor: float) -> TableCounts:
        """These counts, all multiplied by a factor; they become float64."""
        return replace(
            self,
            counts_U=self.counts_U.double() * factor,
            max_undercount=self.max_undercount * factor,
            tail=None if self.tail is None else self.tail.scaled(factor),
            total_lookups=None if self.total_lookups is None else self.total_lookups * factor,
            feature_lookups=tuple(number * factor for number in self.feature_lookups),
            feature_bags=tuple(number * factor for number in self.feature_bags),
        )

    def _sample(self) -> TailSample:
        """The tail, or of exact counts the one that a stream of them would have left."""
        return TailSample.of(self.rows_U, self.counts_U) if self.tail is None else self.tail

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TableCounts)
            and self.num_embeddings == other.num_embeddings
            and self.feature_names == other.feature_names
            and torch.equal(self.rows_U, other.rows_U)
            and torch.equal(self.counts_U.double(), other.counts_U.double())
            and self.max_undercount == other.max_undercount
            and self.tail == other.tail
            and self.num_lookups == other.num_lookups
            and self.feature_lookups == other.feature_lookups
            and self.feature_bags == other.feature_bags
            and self.dependence == other.dependence
        )


def _find(rows_U: Tensor, wanted_V: Tensor) -> tuple[Tensor, Tensor]:
    """Where each wanted row stands among ascending rows, and whether it does."""
    if not rows_U.numel():
        return torch.zeros_like(wanted_V), torch.zeros(wanted_V.numel(), dtype=torch.bool)
    place_V = torch.searchsorted(rows_U, wanted_V).clamp(max=rows_U.numel() - 1)
    return place_V, rows_U[place_V] == wanted_V


def _added(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Sums by feature; not known if either is not."""
    return tuple(a + b for a, b in zip(ours, theirs)) if ours and theirs else ()
