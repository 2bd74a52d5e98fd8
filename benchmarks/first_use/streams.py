"""Samples to look up: real ones where a folder has them, and generated ones.

Every stream is one table of samples. A step takes consecutive ones, each once, and steps lie
evenly over the stream, the last one at its end. Rows that a file sorts by user are dealt out in an
order drawn once, since no training sees a user's clicks side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.click_files import read_clicks
from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.app.zoo.data.criteo import hash_ids
from torchrec_picasso.app.zoo.data.criteo_files import ID_COLUMNS, read_criteo
from torchrec_picasso.app.zoo.data.generated import GeneratedSource
from torchrec_picasso.app.zoo.tables import table_specs
from torchrec_picasso.errors import InputError

FILES = {
    "criteo": "criteo_tb_80k.parquet",
    "alimama": "alimama_10k.parquet",
    "globo_clicks": "globo_clicks_8days.parquet",
    "globo_sessions": "globo_clicks_8days.parquet",
}
"""The file that a stream is read from."""
STREAMS = (*FILES, "zipf")

_MAX_ROWS = 1_000_000
_NUM_GENERATED = 160_000


def read_stream(name: str, folder: str | Path) -> Clicks:
    """Reads or generates the samples of a stream.

    Raises:
        PicassoError: If the file is missing or malformed.
    """
    if name == "zipf":
        return _one_hot(_generated())
    path = Path(folder) / FILES[name]
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    return _READERS[name](path)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Cuts a stream into the batches of steps, evenly spread.

    Args:
        samples: Samples of the stream.
        batch_size: Samples per rank and step.
        world_size: Ranks.
        num_steps: Most steps; a short stream has fewer.
    """

    samples: Clicks
    batch_size: int
    world_size: int
    num_steps: int

    def __len__(self) -> int:
        return min(self.num_steps, len(self.samples) // self._global_size)

    def batches(self, step: int) -> list[Batch]:
        """The batch of each rank."""
        first = (step + 1) * (len(self.samples) // len(self)) - self._global_size
        starts = (first + rank * self.batch_size for rank in range(self.world_size))
        return [self.samples.batch(np.arange(at, at + self.batch_size)) for at in starts]

    @property
    def _global_size(self) -> int:
        return self.batch_size * self.world_size


def _criteo(path: Path) -> Clicks:
    ids_NF = np.concatenate([chunk.ids_NF for chunk in read_criteo(path)])
    tables = table_specs(DataConfig(cardinalities="criteo_terabyte_10m", max_rows=_MAX_ROWS))
    rows_NF = hash_ids(ids_NF, np.array([table.num_embeddings for table in tables]))
    return _one_hot(dict(zip(ID_COLUMNS, np.ascontiguousarray(rows_NF.T))))


def _generated() -> dict[str, np.ndarray]:
    data = DataConfig(batch_size=_NUM_GENERATED, max_rows=_MAX_ROWS)
    batch = next(GeneratedSource(data, seed=0).batches(0, 1))
    features = batch.sparse_features.to_dict()
    return {name: feature.values().numpy() for name, feature in features.items()}


def _alimama(path: Path) -> Clicks:
    clicks = read_clicks(path).hashed(_MAX_ROWS)
    return clicks.take(np.random.default_rng(0).permutation(len(clicks)))


def _globo_clicks(path: Path) -> Clicks:
    samples = read_clicks(path)
    clicks = samples.take(np.flatnonzero(samples.clicked))
    return _one_hot({**clicks.targets, **clicks.profiles})


def _one_hot(columns: dict[str, np.ndarray]) -> Clicks:
    nothing = Clicks(targets={}, histories={}, profiles={}, clicked=np.empty(0, dtype=np.float32))
    labels = np.zeros(len(next(iter(columns.values()))), dtype=np.float32)
    return replace(nothing, profiles=columns, clicked=labels)


_READERS: dict[str, Callable[[Path], Clicks]] = {
    "criteo": _criteo,
    "alimama": _alimama,
    "globo_clicks": _globo_clicks,
    "globo_sessions": read_clicks,
}
