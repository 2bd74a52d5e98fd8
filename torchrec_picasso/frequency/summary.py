"""One line per table: how much it is looked up, how skewed, and what a batch makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchrec_picasso.frequency.counts import TableCounts

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "summarize"]

_SHARES = (0.5, 0.8, 0.9)

COLUMNS = (
    "table",
    "rows",
    "features",
    "lookups",
    "pooling_factor",
    "distinct",
    "unseen_mass",
    "unique_per_batch",
    "rows_for_50",
    "rows_for_80",
    "rows_for_90",
    "max_undercount",
)
"""pooling_factor: lookups per sample over all features of the table. distinct: rows seen.
unseen_mass: share of future lookups that go to rows never seen. unique_per_batch: distinct rows of
a batch. rows_for_50: fewest rows that take 50 % of the lookups."""


def summarize(
    tables: Mapping[str, TableCounts], num_samples: float, batch_size: int
) -> pd.DataFrame:
    """Summarizes every table.

    Args:
        tables: Counts by table name.
        num_samples: Samples counted; where it is 0, one lookup per sample and feature is assumed.
        batch_size: Samples of a batch.

    Returns:
        The columns of :data:`COLUMNS`, tables in the order given.
    """
    import pandas as pd

    lines = []
    for name, counts in tables.items():
        spectrum = counts.spectrum()
        per_sample = (
            counts.num_lookups / num_samples if num_samples else float(len(counts.feature_names))
        )
        lines.append(
            (
                name,
                counts.num_embeddings,
                ", ".join(counts.feature_names),
                counts.num_lookups,
                per_sample,
                counts.num_rows_seen,
                spectrum.unseen_mass,
                spectrum.expected_unique(batch_size * per_sample),
                *(spectrum.rows_for_coverage(share) for share in _SHARES),
                counts.max_undercount,
            )
        )
    return pd.DataFrame(lines, columns=list(COLUMNS))
