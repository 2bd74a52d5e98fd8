"""Reads clicks from a Parquet file of a kind that its columns tell."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_picasso.errors import InputError
from torchrec_picasso.zoo.data import alimama, globo
from torchrec_picasso.zoo.data.clicks import Clicks

__all__ = ["read_clicks"]

_KINDS = {
    "Alimama's rows": (alimama.COLUMNS, alimama.read_alimama),
    "Globo's clicks": (globo.COLUMNS, globo.read_globo),
}


def read_clicks(path: str | Path) -> Clicks:
    """Reads Alimama's rows or Globo's clicks, whichever has more of its columns in the file.

    Args:
        path: Of a Parquet file.

    Raises:
        InputError: If there is no such file, or a column is missing.
    """
    try:
        found = set(pq.read_schema(path).names)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: no Parquet file that can be read ({error})") from error
    kind = max(_KINDS, key=lambda of: len(found.intersection(_KINDS[of][0])))
    columns, read = _KINDS[kind]
    missing = [column for column in columns if column not in found]
    if not missing:
        return read(path)
    expected = "; or ".join(f"{name}: {', '.join(of)}" for name, (of, _) in _KINDS.items())
    if len(missing) == len(columns):
        raise InputError(
            f"{path}: neither of {' nor of '.join(_KINDS)} there is a column, got "
            f"{', '.join(sorted(found)) or 'none'}; expected {expected}"
        )
    raise InputError(
        f"{path}: looks like {kind}, but has no column {missing[0]!r}; expected {expected}"
    )
