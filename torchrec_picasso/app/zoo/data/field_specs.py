"""Randomly drawn fields: a mix of tables as click models have.

Rows are log-uniform: small tables are as common as large ones. Dims, skew and ids per sample are
independent of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torchrec_picasso.errors import ConfigError

LEAST_ROWS = 1_000
WIDEST = 64
_DIMS = (8, 16, 32, WIDEST)
_EXPONENTS = (0.4, 1.3)
_MOST_IDS = 8
_MEAN_SHARE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field and its table.

    Args:
        feature: Name of the field.
        num_embeddings: Rows.
        dim: Columns.
        exponent: Zipf exponent.
        pooling_factor: Ids of each sample.
        mean: Whether rows are averaged, not summed.
    """

    feature: str
    num_embeddings: int
    dim: int
    exponent: float
    pooling_factor: int
    mean: bool

    @property
    def table(self) -> str:
        """Name of the table."""
        return f"t_{self.feature}"


def draw_fields(num_fields: int, max_rows: int, seed: int) -> tuple[FieldSpec, ...]:
    """Draws fields, the same for the same arguments.

    Args:
        num_fields: Number of fields.
        max_rows: Most rows of a table, at least :data:`LEAST_ROWS`.
        seed: Seed.

    Raises:
        ConfigError: If ``max_rows`` is too small.
    """
    if max_rows < LEAST_ROWS:
        raise ConfigError(
            f"data.max_rows: generated fields have tables of {LEAST_ROWS:,} rows or more, got "
            f"{max_rows:,}; raise max_rows"
        )
    rng = np.random.default_rng([seed, num_fields])
    log_rows_F = rng.uniform(math.log(LEAST_ROWS), math.log(max_rows), num_fields)
    return tuple(
        FieldSpec(
            feature=f"f{index}",
            num_embeddings=round(math.exp(log_rows)),
            dim=int(rng.choice(_DIMS)),
            exponent=float(rng.uniform(*_EXPONENTS)),
            pooling_factor=int(rng.integers(1, _MOST_IDS + 1)),
            mean=bool(rng.random() < _MEAN_SHARE),
        )
        for index, log_rows in enumerate(log_rows_F)
    )
