"""Expected rows of one table in a step, as a function of the number of hot rows.

Cumulative sums are computed once per (table, batch size, world size) from the table's spectrum;
each number of hot rows is then an interpolation. Hot rows are evaluated on the sample that they
were selected from, so with many hot rows the number of cold rows is a few percent too low.

Shape letters: K distinct counts, descending: the most frequent rows come first; Q summed
quantities; W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from torchrec_picasso.frequency.spectrum import CountSpectrum

_T = TypeVar("_T", bound="Summable")

HOT_ROW_BYTES = 64
"""Of a hot row on each rank, beside its replica: two ranges of ids of 18 bytes
(``ops/row_order.py``), linear id, home rank and home row, 8 each, and the uses of the replica, 4.
A hot row behind another one needs a single range."""


class Summable:
    """Base of dataclasses of numbers, or of numbers by name, that are summed field by field."""

    def plus(self: _T, other: _T, times: float = 1.0) -> _T:
        """Adds ``times`` the other one; ``times=-1`` subtracts it."""
        sums: dict[str, Any] = {}
        for name, own in vars(self).items():
            added = getattr(other, name)
            if isinstance(own, Mapping):
                keys = {**own, **added}
                sums[name] = {key: own.get(key, 0.0) + times * added.get(key, 0.0) for key in keys}
            else:
                sums[name] = own + times * added
        return type(self)(**sums)

    @classmethod
    def sum(cls: type[_T], items: Iterable[_T]) -> _T:
        """Adds up any number of them."""
        return reduce(cls.plus, items, cls())


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """One table and the lookups of a rank's batch in it."""

    name: str
    num_embeddings: int
    dim: int
    lookups: float
    """Lookups per rank and step: samples x pooling factor, over all features."""
    bags: float
    """Bags, or sequences, per rank and step: samples x features."""
    is_sequence: bool = False
    """Whether the output has a vector of each lookup, not one of each bag."""
    is_weighted: bool = False
    """Whether its module is weighted: a float32 travels with each id, never with a row."""
    row_wise_W: tuple[float, ...] = ()
    """Those of the lookups that equal blocks of rows put on each rank; empty = even."""
    num_features: int = 1
    module: str = ""
    """Path of the table's module; its tables share an exchange."""
    spectrum: CountSpectrum | None = None
    """Distribution of lookups over rows; ``None`` = uniform."""
    element_bytes: int = 4
    optimizer_share: float = 0.0
    """Bytes of optimizer state divided by bytes of weights."""

    @property
    def vectors(self) -> float:
        """Vectors of the output per rank and step."""
        return self.lookups if self.is_sequence else self.bags

    @property
    def weights(self) -> float:
        """Weights of lookups per rank and step."""
        return self.lookups if self.is_weighted else 0.0

    @property
    def row_bytes(self) -> float:
        """Bytes of a row, including its optimizer state."""
        return self.dim * self.element_bytes * (1 + self.optimizer_share)

    @property
    def replica_bytes(self) -> float:
        """Bytes of a replica, including its optimizer state and what says where it is."""
        return self.row_bytes + HOT_ROW_BYTES


@dataclass(frozen=True, kw_only=True)
class HotSplit:
    """Expected distinct rows of a table per step, with its most frequent rows hot."""

    coverage: float  # share of lookups of hot rows
    hot_touched: float  # hot rows in any rank's batch
    cold_touched: float  # cold rows in any rank's batch
    cold_used: float  # cold rows in one rank's batch
    dirty: float  # those that are also in any rank's batch before
    cold_on_host: float  # cold rows in any batch of one host's ranks
    dirty_on_host: float  # those that are also in any rank's batch before


class TableWork:
    """Expected rows of one table at one batch size, with such a batch on each rank."""

    def __init__(self, load: TableLoad, world_size: int, ranks_per_host: int = 1) -> None:
        self.load, self.world_size, self.ranks_per_host = load, world_size, ranks_per_host
        spectrum, rows = load.spectrum, float(load.num_embeddings)
        all_lookups, host_lookups = load.lookups * world_size, load.lookups * ranks_per_host
        self._unseen_used = self._unseen_touched = self._unseen_on_host = 0.0

        def chances(num_lookups: float) -> np.ndarray:
            """Returns the probability that a row is among some lookups, shape ``(K,)``."""
            if spectrum is None or not spectrum.num_lookups:
                # uniform lookups: 1 - (1 - 1 / R)^n
                log_absent = num_lookups * np.log1p(-1 / rows) if rows > 1 else -np.inf
                return np.array([-np.expm1(log_absent)])
            return spectrum.presence(num_lookups).numpy()

        if spectrum is None or not spectrum.num_lookups:
            self.rows_K, share_K = np.array([rows]), np.array([1.0])
        else:
            self.rows_K = spectrum.rows_K.numpy()
            share_K = (spectrum.counts_K * spectrum.rows_K / spectrum.num_lookups).numpy()
            self._unseen_used = spectrum.expected_unseen(load.lookups)
            self._unseen_touched = spectrum.expected_unseen(all_lookups)
            self._unseen_on_host = spectrum.expected_unseen(host_lookups)

        # a row is used if it is in a rank's batch, touched if it is in any rank's batch, and dirty
        # if this batch uses it and, independently, the batch before touched it
        touched_K = chances(all_lookups)
        self.used_K = chances(load.lookups)
        on_host_K = chances(host_lookups)
        used_QK = [self.used_K, self.used_K * touched_K, on_host_K, on_host_K * touched_K]
        by_rows_QK = [share_K / self.rows_K, touched_K, *used_QK]
        # sums over the most frequent rows: 0, then one sum per distinct count
        self._end_K = np.concatenate([[0.0], self.rows_K.cumsum()])
        self._sums_QK = np.zeros((len(by_rows_QK), self._end_K.size))
        np.cumsum(self.rows_K * np.stack(by_rows_QK), axis=1, out=self._sums_QK[:, 1:])

    @property
    def unique(self) -> float:
        """Expected distinct rows of one rank's batch."""
        return float(self._sums_QK[2, -1]) + self._unseen_used

    @property
    def unique_anywhere(self) -> float:
        """Expected distinct rows of all ranks' batches together."""
        return float(self._sums_QK[1, -1]) + self._unseen_touched

    def split(self, num_hot: float) -> HotSplit:
        """Computes the expected rows of a step in which the most frequent rows are hot."""
        # rows of equal count are interpolated
        hot_Q = np.array([np.interp(num_hot, self._end_K, sums_K) for sums_K in self._sums_QK])
        cold_Q = np.maximum(self._sums_QK[:, -1] - hot_Q, 0.0)
        return HotSplit(
            coverage=float(hot_Q[0]),
            hot_touched=float(hot_Q[1]),
            cold_touched=float(cold_Q[1]) + self._unseen_touched,
            cold_used=float(cold_Q[2]) + self._unseen_used,
            dirty=float(cold_Q[3]),
            cold_on_host=float(cold_Q[4]) + self._unseen_on_host,
            dirty_on_host=float(cold_Q[5]),
        )
