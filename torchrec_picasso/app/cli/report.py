"""Reports comparisons on one or more links as a table, JSON and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_picasso.app.cli.outputs import (
    OURS_COLOR,
    STOCK_COLOR,
    new_picture,
    print_table,
    save_picture,
    write_result,
)
from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.runs.compare import CompareSpec, SideResult

_MB = 1e6
_ROUNDING = 1e-6  # relative; a larger difference comes from a ReLU switch


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison with its results.

    Args:
        link: Name of the link between ranks.
        spec: Parameters.
        stock: Result of the stock side.
        ours: Result of this package's side.
        probe_ms: Step time of each probed stock placement.
        pipeline: Description of this package's pipeline; stock's is TorchRec's SparseDist.
    """

    link: str
    spec: CompareSpec
    stock: SideResult
    ours: SideResult
    probe_ms: Mapping[str, float]
    pipeline: str

    @property
    def max_relative_loss_difference(self) -> float:
        """Largest difference of the losses of a step, relative to stock's."""
        return max(
            abs(ours - stock) / abs(stock)
            for stock, ours in zip(self.stock.losses, self.ours.losses)
        )

    @property
    def sent_bytes_ratio(self) -> float:
        """Sent bytes, stock over ours."""
        return self.stock.sent_bytes_per_step / self.ours.sent_bytes_per_step

    @property
    def cpu_ratio(self) -> float:
        """CPU seconds per step, ours over stock."""
        return self.ours.cpu_s_per_step / self.stock.cpu_s_per_step


def _described(config: TrainConfig) -> str:
    kind = config.model.kind
    dim = config.model.embedding_dim
    if config.data.kind == "criteo":
        return f"{kind.upper()}, {config.data.num_tables} tables x {dim}"
    if config.data.kind == "fields":
        return f"{kind.upper()}, {config.data.num_tables} fields, dim {dim}"
    return f"{kind.upper()}, clicks with histories, dim {dim}"


def print_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Prints a table on stdout, the links of one run side by side."""
    config = comparisons[0].spec.config
    print(
        f"\n{_described(config)}, {config.ranks} ranks x "
        f"{config.data.batch_size} samples, {config.data.path or 'generated samples'}"
    )
    for comparison in comparisons:
        _print_plans(comparison)
    print_table(
        *(
            (lines[0][0], *(cell for line in lines for cell in line[1:]))
            for lines in zip(*map(_rows, comparisons))
        )
    )
    if any(comparison.max_relative_loss_difference > _ROUNDING for comparison in comparisons):
        print(
            "  (sums in another order round differently; a ReLU whose input is that close to 0\n"
            "  switches, and the two runs diverge from there)"
        )
    print("  (times of ranks that share the cores of one machine)")


def _print_plans(comparison: Comparison) -> None:
    stock, probe_ms = comparison.stock, comparison.probe_ms
    probed = ", ".join(f"{name} {ms:.0f} ms" for name, ms in probe_ms.items())
    print(
        f"{comparison.link}: {len(stock.losses)} steps; stock {stock.placement}, sparse_dist"
        + (f" (probed: {probed})" if probed else "")
        + f"; hot_cold {comparison.pipeline}"
    )
    if probe_ms and min(probe_ms, key=lambda name: probe_ms[name]) != stock.placement:
        print("  (column_wise keeps a row-wise Adagrad state per column shard, another optimizer)")
    if not comparison.ours.hot_cold_tables:
        print("  the planner chose stock tables on both sides; --hot-rows 0 makes all hot/cold")


def _rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Lines of the table for one link: name, stock, ours, change."""
    stock, ours = comparison.stock, comparison.ours
    return [
        ("", comparison.link, "", ""),
        ("", "stock", "hot_cold", ""),
        ("loss, last step", f"{stock.losses[-1]:.7f}", f"{ours.losses[-1]:.7f}", ""),
        ("largest loss difference", "", f"{comparison.max_relative_loss_difference:.1e}", "rel."),
        _row("MB sent per rank, step", _megabytes(stock), _megabytes(ours), "{:.2f}"),
        _row(
            "collectives per step", stock.collectives_per_step, ours.collectives_per_step, "{:.1f}"
        ),
        _row("samples/s", stock.samples_per_s, ours.samples_per_s, "{:,.0f}", "slower", "faster"),
        _row("CPU s per step", stock.cpu_s_per_step, ours.cpu_s_per_step, "{:.3f}"),
        ("lookups served hot", "-", f"{ours.hot_share:.1%}", ""),
    ]


def _megabytes(side: SideResult) -> float:
    return side.sent_bytes_per_step / _MB


def _row(
    name: str, stock: float, ours: float, style: str, smaller: str = "less", larger: str = "more"
) -> tuple[str, str, str, str]:
    return name, style.format(stock), style.format(ours), change(stock, ours, smaller, larger)


def change(stock: float, ours: float, smaller: str, larger: str) -> str:
    """How far ``ours`` is from ``stock``, in words such as ``1.20 x less``; empty if one is 0."""
    if not (stock > 0 and ours > 0):
        return ""
    times = f"{max(stock / ours, ours / stock):.2f}"
    return "equal" if times == "1.00" else f"{times} x {larger if ours > stock else smaller}"


def write_json(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes all measurements as JSON, a list of links."""
    links = [
        {
            **dataclasses.asdict(comparison),
            "max_relative_loss_difference": comparison.max_relative_loss_difference,
            "sent_bytes_ratio": comparison.sent_bytes_ratio,
            "cpu_ratio": comparison.cpu_ratio,
        }
        for comparison in comparisons
    ]
    write_result({"links": links}, path)


def draw_comparisons(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draws losses, bytes and speed of both sides, a line of axes for each link."""
    figure, _ = new_picture(14, 3.8 * len(comparisons), num_axes=3, num_lines=len(comparisons))
    for comparison, left, middle, right in zip(comparisons, *(figure.axes[i::3] for i in range(3))):
        stock, ours = comparison.stock, comparison.ours
        _draw_losses(comparison, left)
        _draw_bars(comparison, middle, _megabytes(stock), _megabytes(ours), "{:.1f}")
        words = change(_megabytes(stock), _megabytes(ours), "fewer", "more")
        middle.set(ylabel="MB sent per rank and step", title=f"{words} bytes")
        _draw_bars(comparison, right, stock.samples_per_s, ours.samples_per_s, "{:,.0f}")
        words = change(stock.samples_per_s, ours.samples_per_s, "slower", "faster")
        right.set(ylabel="samples/s", title=words)
    save_picture(figure, path)


def _draw_losses(comparison: Comparison, axes: Any) -> None:
    stock, ours = comparison.stock, comparison.ours
    steps = range(1, len(stock.losses) + 1)
    axes.plot(steps, stock.losses, color=STOCK_COLOR, linewidth=6, label=f"stock {stock.placement}")
    axes.plot(steps, ours.losses, color=OURS_COLOR, linewidth=1.6, label="hot_cold")
    axes.set(
        xlabel="step",
        ylabel="loss (mean over ranks)",
        title=f"{comparison.link}: largest relative difference "
        f"{comparison.max_relative_loss_difference:.0e}",
    )


def _draw_bars(comparison: Comparison, axes: Any, stock: float, ours: float, style: str) -> None:
    names = (f"stock\n{comparison.stock.placement}", "hot_cold")
    bars = axes.bar(names, (stock, ours), color=(STOCK_COLOR, OURS_COLOR), width=0.55)
    axes.bar_label(bars, fmt=style, padding=3)
    axes.margins(y=0.12)
