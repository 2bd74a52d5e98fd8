"""Small Criteo files, written as Parquet and as text from the same samples."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from torchrec_picasso.app.zoo.data.criteo_files import DENSE_COLUMNS, ID_COLUMNS


def samples(num_samples: int, seed: int = 0) -> dict[str, list[int | None]]:
    """Columns of random samples; about one value in ten is missing, labels never are."""
    rng = np.random.default_rng(seed)

    def column(high: int) -> list[int | None]:
        values = rng.integers(0, high, num_samples)
        missing = rng.random(num_samples) < 0.1
        return [None if gone else int(value) for value, gone in zip(values, missing)]

    columns: dict[str, list[int | None]] = {
        "label": [int(value) for value in rng.integers(0, 2, num_samples)]
    }
    columns |= {name: column(1000) for name in DENSE_COLUMNS}
    columns |= {name: column(1 << 32) for name in ID_COLUMNS}
    return columns


def write_parquet(path: Path, columns: dict[str, list[int | None]]) -> Path:
    arrays = {
        name: pa.array(values, pa.float32() if name in DENSE_COLUMNS else pa.int64())
        for name, values in columns.items()
    }
    pa.parquet.write_table(pa.table(arrays), path, row_group_size=37)
    return path


def text_lines(columns: dict[str, list[int | None]]) -> list[str]:
    def spell(name: str, value: int | None) -> str:
        if value is None:
            return ""
        return f"{value:08x}" if name in ID_COLUMNS else str(value)

    names = list(columns)
    return [
        "\t".join(spell(name, value) for name, value in zip(names, row))
        for row in zip(*columns.values())
    ]


def write_text(path: Path, columns: dict[str, list[int | None]]) -> Path:
    path.write_text("".join(line + "\n" for line in text_lines(columns)))
    return path
