"""Reads Criteo samples from Parquet or from Criteo's published text, a chunk at a time.

Both formats give the same chunks, of some tens of megabytes for any size of file. The first bytes
of the file determine the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from torchrec_picasso.app.config.schema import NUM_CRITEO_TABLES
from torchrec_picasso.app.zoo.tables import NUM_DENSE
from torchrec_picasso.errors import PicassoError, first_line

MISSING_ID = -1
"""Id of a missing categorical value."""

DENSE_COLUMNS = tuple(f"i{index + 1}" for index in range(NUM_DENSE))
ID_COLUMNS = tuple(f"c{index + 1}" for index in range(NUM_CRITEO_TABLES))
_COLUMNS = ("label", *DENSE_COLUMNS, *ID_COLUMNS)

_ROWS_PER_CHUNK = 65_536
_TEXT_BLOCK_BYTES = 16 << 20
_HEX_DIGITS = 8  # Criteo publishes 32-bit hashes
_NIBBLE_OF_CHAR = np.full(256, -1, dtype=np.int8)
for _characters in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _NIBBLE_OF_CHAR[np.frombuffer(_characters, dtype=np.uint8)] = np.arange(16)


@dataclass(frozen=True, kw_only=True)
class SampleChunk:
    """N consecutive samples as the file holds them.

    Args:
        labels_N: Labels, 0 or 1, float32, shape ``(N,)``.
        dense_NI: Integer features as float32, NaN where missing, shape ``(N, 13)``.
        ids_NF: Hashed ids, int64, :data:`MISSING_ID` where missing, shape ``(N, 26)``.
    """

    labels_N: NDArray[np.float32]
    dense_NI: NDArray[np.float32]
    ids_NF: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels_N)

    def slice(self, start: int, stop: int) -> SampleChunk:
        """Samples ``start`` to ``stop``, without a copy."""
        return SampleChunk(
            labels_N=self.labels_N[start:stop],
            dense_NI=self.dense_NI[start:stop],
            ids_NF=self.ids_NF[start:stop],
        )


def is_parquet(path: str | Path) -> bool:
    """Whether a path is a file that starts like Parquet."""
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def read_criteo(path: str | Path) -> Iterator[SampleChunk]:
    """Reads a Criteo file once.

    Args:
        path: Parquet with the columns ``label, i1..i13, c1..c26`` (null = missing), or Criteo's
            published text: a label, 13 integers and 26 hexadecimal ids per line, separated by tabs,
            no header, an empty field = missing.

    Yields:
        Chunks in file order.

    Raises:
        PicassoError: If the file is missing, empty or malformed; names file, column or line.
    """
    path = Path(path)
    if not path.is_file():
        raise PicassoError(
            f"{path}: no such file; give a Criteo file, Parquet or tab-separated text"
        )
    if not path.stat().st_size:
        raise PicassoError(f"{path}: the file is empty; expected Criteo samples")
    chunks = _read_parquet(path) if is_parquet(path) else _read_text(path)
    num_samples = 0
    for chunk in chunks:
        _check_labels(chunk.labels_N, path, num_samples)
        num_samples += len(chunk)
        yield chunk
    if not num_samples:
        raise PicassoError(f"{path}: the file holds no samples; expected at least one")


def _read_parquet(path: Path) -> Iterator[SampleChunk]:
    try:
        file = pa.parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise PicassoError(f"{path}: damaged Parquet file ({first_line(error)})") from error
    with file:
        _check_columns(file.schema_arrow, path)
        try:
            for batch in file.iter_batches(_ROWS_PER_CHUNK, columns=list(_COLUMNS)):
                yield _to_chunk(batch, [_int_ids(batch.column(name)) for name in ID_COLUMNS])
        except (pa.ArrowInvalid, OSError) as error:
            raise PicassoError(f"{path}: damaged Parquet file ({first_line(error)})") from error


def _check_columns(schema: pa.Schema, path: Path) -> None:
    missing = [name for name in _COLUMNS if name not in schema.names]
    if missing:
        raise PicassoError(
            f"{path}: missing column {', '.join(missing)}; expected label, i1..i13, c1..c26; "
            f"found {', '.join(schema.names) or 'none'}"
        )
    for name in _COLUMNS:
        found = schema.field(name).type
        is_number = pa.types.is_integer(found) or pa.types.is_floating(found)
        if name in ID_COLUMNS and not pa.types.is_integer(found):
            raise PicassoError(
                f"{path}: column {name} must hold integers (hashed ids), found {found}"
            )
        if name not in ID_COLUMNS and not is_number:
            raise PicassoError(f"{path}: column {name} must hold numbers, found {found}")


def _read_text(path: Path) -> Iterator[SampleChunk]:
    bad_lines: list[Any] = []

    def remember(line: Any) -> str:
        bad_lines.append(line)
        return "error"

    try:
        with pa.csv.open_csv(
            path,
            read_options=pa.csv.ReadOptions(
                column_names=list(_COLUMNS), use_threads=False, block_size=_TEXT_BLOCK_BYTES
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter="\t",
                quote_char=False,
                ignore_empty_lines=False,
                invalid_row_handler=remember,
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types={name: pa.int64() for name in _COLUMNS if name not in ID_COLUMNS}
                | {name: pa.string() for name in ID_COLUMNS},
                null_values=[""],
                strings_can_be_null=True,
            ),
        ) as reader:
            num_lines = 0
            for batch in reader:
                ids = [_hex_ids(batch.column(n), path, n, num_lines) for n in ID_COLUMNS]
                yield _to_chunk(batch, ids)
                num_lines += batch.num_rows
    except pa.ArrowInvalid as error:
        raise PicassoError(_explain_text_error(path, error, bad_lines)) from error


def _explain_text_error(path: Path, error: pa.ArrowInvalid, bad_lines: list[Any]) -> str:
    expected = (
        "expected Criteo's text: label, 13 integers, 26 hexadecimal ids, tabs between, no header"
    )
    if bad_lines:
        line = bad_lines[0]
        return (
            f"{path}: line {line.number} has {line.actual_columns} fields, expected "
            f"{line.expected_columns}; {expected}"
        )
    found = re.search(r"CSV column #(\d+): (?:Row #(\d+): )?.*invalid value '(.*)'", str(error))
    if found:
        column = _COLUMNS[int(found.group(1))]
        line_text = f"line {found.group(2)}, " if found.group(2) else ""
        return f"{path}: {line_text}column {column}: {found.group(3)!r} is no integer; {expected}"
    return f"{path}: not readable as text ({first_line(error)}); {expected}"


def _to_chunk(batch: pa.RecordBatch, ids: list[NDArray[np.int64]]) -> SampleChunk:
    dense = [_floats(batch.column(name)) for name in DENSE_COLUMNS]
    return SampleChunk(
        labels_N=_floats(batch.column("label")),
        dense_NI=np.stack(dense, axis=1),
        ids_NF=np.stack(ids, axis=1),
    )


def _floats(column: pa.Array) -> NDArray[np.float32]:
    """Numbers as float32, null as NaN."""
    as_float = column.cast(pa.float32(), safe=False)
    return np.array(as_float.fill_null(float("nan")), dtype=np.float32)


def _int_ids(column: pa.Array) -> NDArray[np.int64]:
    return np.asarray(column.cast(pa.int64(), safe=False).fill_null(MISSING_ID), dtype=np.int64)


def _hex_ids(column: pa.Array, path: Path, name: str, num_lines_before: int) -> NDArray[np.int64]:
    """Parses hexadecimal text of a whole column: pads to 8 digits, then 8 table lookups."""
    digits = pc.utf8_lpad(column.fill_null("0"), width=_HEX_DIGITS, padding="0")
    too_long_N = np.asarray(pc.greater(pc.binary_length(digits), _HEX_DIGITS))
    if not too_long_N.any():
        text = np.frombuffer(digits.buffers()[2], dtype=np.uint8)
        start = digits.offset * _HEX_DIGITS
        text_N8 = text[start : start + len(digits) * _HEX_DIGITS].reshape(-1, _HEX_DIGITS)
        nibbles_N8 = _NIBBLE_OF_CHAR[text_N8]
        wrong_N = (nibbles_N8 < 0).any(axis=1)
    else:
        wrong_N = too_long_N
    if wrong_N.any():
        first = int(wrong_N.argmax())
        raise PicassoError(
            f"{path}: line {num_lines_before + first + 1}, column {name}: "
            f"{column[first].as_py()!r} is no hexadecimal id of at most {_HEX_DIGITS} digits"
        )
    shifts_8 = np.arange(_HEX_DIGITS - 1, -1, -1, dtype=np.int64) * 4
    ids_N = (nibbles_N8.astype(np.int64) << shifts_8).sum(axis=1)
    ids_N[np.asarray(column.is_null())] = MISSING_ID
    return ids_N


def _check_labels(labels_N: NDArray[np.float32], path: Path, num_samples_before: int) -> None:
    wrong_N = (labels_N != 0) & (labels_N != 1)  # true for NaN
    if wrong_N.any():
        first = int(wrong_N.argmax())
        raise PicassoError(
            f"{path}: sample {num_samples_before + first + 1}, column label: expected 0 or 1, got "
            f"{labels_N[first]:g}"
        )
