"""Small steps on slow and fast links, with the defaults, against the best stock plan: a heat map.

    python -m benchmarks.small_steps -o small_steps --data-folder ../shared/data
    python -m benchmarks.small_steps -o small_steps --links 0 --samples 64 256 --models criteo

Each cell is a comparison of `benchmarks.fields`: stock's two variants under
TrainPipelineSparseDist, ``ours``, the package's defaults, and ``all_rows``, every table hot/cold,
take turns: the last shows whether the planner chose well. ``table_wise_again``, ``table_wise`` once
more, shows noise: its gain would be 1 where ``table_wise`` is the best stock variant, and is less
where ``planner`` is faster. The axes of the map are

- samples per rank and step, and columns (of the widest table where tables are mixed);
- model: Criteo's 26 tables, 40 mixed fields, and a DIN-like model of sequences;
- rate of the links between two hosts of one rank and one core, Mbit/s; 0 = loopback, as fast as the
  machine.

Every cell is a JSON file of its own in the folder; one that is there is not measured again, so a
run that was stopped goes on. Before its first cell of each link and model a run measures the curves
of the link: the speed of a shared machine changes within an hour.
`summary.json` has the figures of all cells that are there, and `summary.png` their gains.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.calibrated import calibrated_curves
from benchmarks.cluster import ClusterError, usable_rate
from benchmarks.command import at_least, command_parser
from benchmarks.fields.__main__ import answer
from benchmarks.fields.question import UNIFORM, Question
from benchmarks.fields.variants import AGAIN
from benchmarks.pipelines.report import write_report
from torchrec_picasso import CommCurves
from torchrec_picasso.app.cli.outputs import print_table, write_result
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.errors import InputError, PicassoError

SAMPLES, DIMS, LINKS_MBIT = (64, 256, 1024, 4096), (16, 32, 128), (0, 10_000, 1_000)
_MODELS: Mapping[str, tuple[str, str | None]] = {
    "criteo": ("columns", "criteo_tb_80k.parquet"),
    "fields": ("fields", None),
    "sequences": ("sequences", "alimama_10k.parquet"),
}
"""Model of `benchmarks.fields` and its file, by name."""
_VARIANTS = ("table_wise", "planner", "ours", "all_rows", AGAIN)
_ROUNDS, _BLOCK_SAMPLES, _FEWEST_STEPS, _MOST_STEPS = 10, 8_192, 4, 32
"""A turn has as many steps as make this number of samples, within these bounds: short turns, and
many, because the pace of a shared machine changes within seconds."""
_EVEN = 0.98
"""Gains from here on count as not below stock; noise is larger (docs/dev/log.md)."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Figures of one comparison.

    Args:
        model: Name of the model.
        samples: Samples per rank and step.
        dim: Columns.
        rate_mbit: Rate of the links; 0 = loopback.
        gain: Samples per second, ours over the best stock variant's, median of the rounds.
        gains: Smallest and largest of the rounds.
        all_rows_gain: Gain of ``all_rows``, median.
        stock_ms: Step of the best stock variant, ms.
        ours_ms: Our step, ms.
        stock_cpu_ms: CPU time of a rank in stock's step, ms.
        ours_cpu_ms: CPU time of a rank in our step, ms.
        hot_cold: Hot/cold tables of our plan.
        tables: Tables of the model.
        setting: Micro-batches of our pipeline, and whether without lookahead.
        predicted: Predicted over measured step, minus 1, of the best stock variant, of ours and of
            ``all_rows``.
        again_gain: Gain of ``table_wise_again`` over the best stock variant, median; ``None`` in
            older files.
    """

    model: str
    samples: int
    dim: int
    rate_mbit: float
    gain: float
    gains: tuple[float, float]
    all_rows_gain: float
    stock_ms: float
    ours_ms: float
    stock_cpu_ms: float
    ours_cpu_ms: float
    hot_cold: int
    tables: int
    setting: str
    predicted: tuple[float, float, float]
    again_gain: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is not there yet, and shows all.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    folder = Path(args.out)
    cells = list(itertools.product(args.links, args.models, args.samples, args.dims))
    curves: dict[tuple[int, str], CommCurves] = {}
    try:
        for model in args.models:  # not hours later, in the last model's first cell
            _data_of(model, args)
        folder.mkdir(parents=True, exist_ok=True)
        for place, (rate, model, samples, dim) in enumerate(cells):
            path = folder / f"{model}_{samples}_{dim}_{rate}.json"
            if not path.exists():
                print(f"{path.stem}: {place + 1} of {len(cells)}", flush=True)
                question = question_of(model, samples, dim, rate, args)
                key = rate, model
                if key not in curves:
                    file = folder / f"curves_{rate}_{model}.json"
                    file.unlink(missing_ok=True)
                    curves[key] = calibrated_curves(file, question.hosts, question.rate_mbit)
                write_report(answer(question, curves[key]), path)
                _print([read_cell(path)])
    except (PicassoError, RankError, ClusterError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = [read_cell(path) for path in sorted(folder.glob("*_*_*_*.json"))]
    _print(found)
    write_result({"cells": [asdict(cell) for cell in found]}, folder / "summary.json")
    draw(found, folder / "summary.png")
    return 0


def question_of(
    model: str, samples: int, dim: int, rate_mbit: int, args: argparse.Namespace
) -> Question:
    """Settings of a cell's comparison.

    Raises:
        ClusterError: If links cannot have the rate: a heat map does not mix it with loopback.
    """
    rate = usable_rate(rate_mbit or None)
    if rate_mbit and rate is None:
        raise ClusterError(f"no links of {rate_mbit} Mbit/s; leave them out by --links 0")
    return Question(
        rate_mbit=rate,
        model=_MODELS[model][0],
        data=_data_of(model, args),
        dim=dim,
        batch_size=samples,
        rounds=args.rounds,
        block_steps=min(_MOST_STEPS, max(_FEWEST_STEPS, _BLOCK_SAMPLES // samples)),
        dense=True,
        variants=_VARIANTS,
    )


def _data_of(model: str, args: argparse.Namespace) -> str | None:
    """The data of a model as :class:`Question` names them; InputError if the folder lacks them."""
    kind, file = _MODELS[model]
    if not args.data_folder or file is None:
        return UNIFORM if kind == "columns" else None
    path = Path(args.data_folder) / file
    if not path.is_file():
        raise InputError(f"--data-folder: there is no {path}; leave it out for generated data")
    return str(path)


def read_cell(path: Path) -> Cell:
    """Reads what :func:`benchmarks.pipelines.report.write_report` wrote."""
    document: dict[str, Any] = json.loads(path.read_text())
    model, samples, dim, rate = path.stem.split("_")
    found, errors = document["variants"], document["errors"]["step"]
    stock = max(
        (name for name in found if found[name]["is_stock"]),
        key=lambda name: found[name]["samples_per_s"],
    )
    best, ours = found[stock], found["ours"]
    hosts = document["question"]["hosts"]
    gains = ours["ratio_by_round"]
    return Cell(
        model=model,
        samples=int(samples),
        dim=int(dim),
        rate_mbit=float(rate),
        gain=median(gains),
        gains=(min(gains), max(gains)),
        all_rows_gain=median(found["all_rows"]["ratio_by_round"]),
        stock_ms=best["step_ms"][1],
        ours_ms=ours["step_ms"][1],
        stock_cpu_ms=1e3 * best["cpu_s_per_step"] / hosts,
        ours_cpu_ms=1e3 * ours["cpu_s_per_step"] / hosts,
        hot_cold=ours["tables"].get("hot_cold", 0),
        tables=len(document["tables"]),
        setting=f"K={ours['num_micro_batches']}{'' if ours['lookahead'] else ', no lookahead'}",
        predicted=(errors[stock], errors["ours"], errors["all_rows"]),
        again_gain=median(found[AGAIN]["ratio_by_round"]) if AGAIN in found else None,
    )


def _print(cells: Sequence[Cell]) -> None:
    head = (
        "cell",
        "gain",
        "by round",
        "stock again",
        "all rows",
        "stock ms",
        "ours ms",
        "CPU",
        "CPU ours",
    )
    rows = [
        (
            f"{cell.model} {cell.samples} x {cell.dim} at {cell.rate_mbit:g}",
            f"{cell.gain:.2f}",
            f"{cell.gains[0]:.2f}-{cell.gains[1]:.2f}",
            "-" if cell.again_gain is None else f"{cell.again_gain:.2f}",
            f"{cell.all_rows_gain:.2f}",
            f"{cell.stock_ms:.1f}",
            f"{cell.ours_ms:.1f}",
            f"{cell.stock_cpu_ms:.1f}",
            f"{cell.ours_cpu_ms:.1f}",
            f"{cell.hot_cold}/{cell.tables}",
            cell.setting,
            *(f"{error:+.0%}" for error in cell.predicted),
        )
        for cell in cells
    ]
    print_table((*head, "hot/cold", "setting", "price: stock", "ours", "all rows"), *rows)
    below = sum(cell.gain < _EVEN for cell in cells)
    again = sum(cell.again_gain is not None and cell.again_gain < _EVEN for cell in cells)
    errors = [abs(error) for cell in cells for error in cell.predicted]
    print(
        f"  {below} of {len(cells)} below {_EVEN:.2f} of stock, {again} of stock again; "
        f"predictions are off by {median(errors):.0%} in the median and {max(errors):.0%} at worst",
        flush=True,
    )


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draws gains: a map of samples and columns for each link (row) and model (column)."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    gains = {(c.rate_mbit, c.model, c.samples, c.dim): c.gain for c in cells}
    links, models, samples, dims = (sorted({key[axis] for key in gains}) for axis in range(4))
    figure = Figure(figsize=(3.4 * len(models), 2.6 * len(links)), layout="constrained")
    axes_LM = figure.subplots(len(links), len(models), squeeze=False)
    norm = TwoSlopeNorm(1.0, 0.5, 2.0)
    for (row, rate), (column, model) in itertools.product(enumerate(links), enumerate(models)):
        axes = axes_LM[row][column]
        map_DS = [[gains.get((rate, model, n, dim), float("nan")) for n in samples] for dim in dims]
        axes.imshow(map_DS, cmap="RdYlGn", norm=norm, aspect="auto")
        for (y, gains_S), (x, _) in itertools.product(enumerate(map_DS), enumerate(samples)):
            axes.text(x, y, f"{gains_S[x]:.2f}", ha="center", va="center")
        axes.set_xticks(range(len(samples)), samples)
        axes.set_yticks(range(len(dims)), dims)
        axes.set_title(f"{model}, {f'{rate:g} Mbit/s' if rate else 'loopback'}", fontsize=10)
        axes.set_xlabel("samples per rank")
        axes.set_ylabel("columns")
    figure.suptitle("Samples per second over the best stock plan's")
    figure.savefig(path, dpi=120)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.small_steps", __doc__)
    add = parser.add_argument
    add("-o", "--out", required=True, metavar="FOLDER", help="a JSON file per cell goes there")
    add("--samples", nargs="+", type=at_least(2), default=SAMPLES, metavar="N", help="per rank")
    add("--dims", nargs="+", type=at_least(4), default=DIMS, metavar="N", help="columns")
    add("--models", nargs="+", choices=_MODELS, default=list(_MODELS), help="models")
    links = f"rates in Mbit/s, 0 = loopback (default: {LINKS_MBIT})"
    add("--links", nargs="+", type=at_least(0), default=LINKS_MBIT, metavar="N", help=links)
    add("--data-folder", metavar="FOLDER", help="real samples (default: uniform, generated ones)")
    add("--rounds", type=at_least(1), default=_ROUNDS, metavar="N", help="turns of each variant")
    return parser


if __name__ == "__main__":
    sys.exit(main())
