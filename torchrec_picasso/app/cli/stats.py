"""``torchrec-picasso stats``: counts the ids of data files and prints their skew."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.cli.checks import rows_by_feature
from torchrec_picasso.app.cli.outputs import new_picture, print_table, save_picture
from torchrec_picasso.app.config import DataConfig, TrainConfig, load_config
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.zoo.data.criteo import hash_ids, log_dense
from torchrec_picasso.app.zoo.data.criteo_files import MISSING_ID, is_parquet, read_criteo
from torchrec_picasso.app.zoo.data.source import make_batch
from torchrec_picasso.app.zoo.registry import build_model, make_source
from torchrec_picasso.app.zoo.tables import table_specs
from torchrec_picasso.frequency import FrequencyStats, ModelTable, select_hot_rows
from torchrec_picasso.frequency.collect import model_tables

if TYPE_CHECKING:
    import pandas as pd

_TEXT_BYTES_PER_CHUNK = 16 << 20  # approximate, for the progress bar
_MOST_LABELS = 12


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    config = load_config(args.config) if args.config else None
    if config is not None and args.files:
        config = replace(config, data=replace(config.data, path=args.files[0]))
    batch_size = args.batch_size or (config.data.batch_size if config is not None else 4096)
    if config is None:
        tables = [
            ModelTable(name=name, num_embeddings=rows, feature_names=(name,))
            for name, rows in rows_by_feature(args).items()
        ]
        stats = _count_parquet(args, args.files, tables, hash_ids=args.hash)
    else:
        model = build_model(config, make_source(config.data, config.seed))
        files = args.files or ([config.data.path] if config.data.path is not None else [])
        if files and config.data.kind == "criteo" and all(map(is_parquet, files)):
            stats = _count_parquet(
                args, files, model_tables(model), hash_ids=True, missing_id=MISSING_ID
            )
        else:
            stats = _count_batches(args, files, config, model)
    stats.to_parquet(args.out)  # before anything else can fail
    _print_tables(stats.summary(batch_size), batch_size)
    if args.hot_rows:
        _print_hot_set(stats, args.hot_rows, batch_size)
    if args.plot:
        _draw_coverage(stats, Path(args.plot))
    print("wrote " + " and ".join(filter(None, (args.out, args.plot))))


def _count_parquet(
    args: argparse.Namespace,
    files: list[str],
    tables: list[ModelTable],
    *,
    hash_ids: bool,
    missing_id: int | None = None,
) -> FrequencyStats:
    progress = Progress("count", sum(map(_num_samples, files)))
    stats = FrequencyStats.from_files(
        files,
        tables,
        hash_ids=hash_ids,
        missing_id=missing_id,
        max_rows_counted=args.max_rows_counted,
        progress=progress.advance,
    )
    progress.close()
    return stats


def _num_samples(file: str) -> int:
    """Reads the number of samples; 0 if the file is unreadable, which the counting refuses."""
    try:
        num_samples: int = pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError):
        return 0
    return num_samples


def _count_batches(
    args: argparse.Namespace,
    files: list[str],
    config: TrainConfig,
    model: nn.Module,
) -> FrequencyStats:
    """Counts batches: of Criteo's text, clicks with histories, or generated data."""
    batches: Iterator[Batch]
    is_text = bool(files) and config.data.kind == "criteo"
    if is_text:
        num_bytes = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
        progress = Progress("count", -(-num_bytes // _TEXT_BYTES_PER_CHUNK))
        batches = itertools.chain.from_iterable(_text_batches(file, config.data) for file in files)
    else:
        progress = Progress("count", args.batches)
        source = make_source(config.data, config.seed)
        batches = itertools.islice(source.batches(rank=0, world_size=1), args.batches)

    def counted() -> Iterator[Batch]:
        for batch in batches:
            yield batch
            progress.advance()

    stats = FrequencyStats.collect(counted(), model, max_rows_counted=args.max_rows_counted)
    progress.close()
    return replace(stats, num_batches=0) if is_text else stats


def _text_batches(file: str, data: DataConfig) -> Iterator[Batch]:
    """Batches of a Criteo file with the row ids that training uses."""
    columns = table_specs(data)
    rows_F = np.array([column.num_embeddings for column in columns], dtype=np.int64)
    names = [column.feature for column in columns]
    for chunk in read_criteo(file):
        ids_BF = hash_ids(chunk.ids_NF, rows_F)
        yield make_batch(chunk.labels_N, log_dense(chunk.dense_NI), ids_BF, names)


def _print_tables(summary: pd.DataFrame, batch_size: int) -> None:
    """Prints one line per table."""
    shown = {
        "table": summary["table"],
        "rows": summary["rows"].map("{:,}".format),
        "lookups": summary["lookups"].map("{:,.0f}".format),
        "per sample": summary["pooling_factor"].map("{:.2f}".format),
        "distinct": summary["distinct"].map("{:,}".format),
        "unseen": summary["unseen_mass"].map("{:.2%}".format),
        "unique": summary["unique_per_batch"].map("{:,.0f}".format),
        "rows for 50 %": summary["rows_for_50"].map("{:,}".format),
        "80 %": summary["rows_for_80"].map("{:,}".format),
        "90 %": summary["rows_for_90"].map("{:,}".format),
        "lacks at most": summary["max_undercount"].map("{:g}".format),
    }
    print()
    print_table([*shown], *zip(*shown.values()))
    lookups = float((summary["pooling_factor"] * batch_size).sum())
    unique = float(summary["unique_per_batch"].sum())
    share = f", {unique / lookups:.0%}" if lookups else ""
    print(
        f"  a batch of {batch_size:,} samples has {lookups:,.0f} lookups and {unique:,.0f} distinct"
        f" rows (unique{share}); unseen: share of lookups that go to rows never seen"
    )


def _print_hot_set(stats: FrequencyStats, num_hot: int, batch_size: int) -> None:
    """Prints the coverage of a hot set and the remaining cold rows of a batch."""
    rows = {name: counts.num_embeddings for name, counts in stats.tables.items()}
    hot = select_hot_rows(rows, num_hot, stats)
    served = total = cold = 0.0
    for name, counts in stats.tables.items():
        spectrum, num_hot_here = counts.spectrum, hot[name].numel()
        served += spectrum.coverage(num_hot_here) * counts.num_lookups
        total += counts.num_lookups
        per_sample = counts.num_lookups / stats.num_samples if stats.num_samples else 0.0
        cold += spectrum.expected_cold(batch_size * per_sample, num_hot_here)
    print(
        f"  the {num_hot:,} most frequent rows took {served / max(total, 1):.1%} of the lookups; "
        f"a batch has {cold:,.0f} distinct rows beside them"
    )


def _draw_coverage(stats: FrequencyStats, path: Path) -> None:
    """Draws the share of lookups over the share of rows, the most frequent first."""
    from matplotlib import colormaps  # slow to import

    figure, axes = new_picture(7.5, 4.8)
    spectra = {name: counts.spectrum for name, counts in stats.tables.items()}
    spectra = {name: spectrum for name, spectrum in spectra.items() if spectrum.num_lookups}
    for index, (name, spectrum) in enumerate(spectra.items()):
        rows_K, share_K = spectrum.coverage_curve()
        label = name if len(spectra) <= _MOST_LABELS else None
        color = colormaps["viridis"](0.95 * index / max(1, len(spectra) - 1))
        # without 0 rows, which a logarithmic axis lacks
        share_of_rows_K = rows_K[1:] / spectrum.num_embeddings
        axes.plot(share_of_rows_K, share_K[1:], label=label, color=color)
    axes.set(
        xscale="log",
        xlabel="share of the table's rows, most frequent first",
        ylabel="share of the lookups",
        ylim=(0, 1.02),
        title="Coverage",
    )
    save_picture(figure, path)
