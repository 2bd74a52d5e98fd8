"""Reports a comparison as a table, JSON and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrec_picasso.app.cli.outputs import (
    OURS_COLOR,
    STOCK_COLOR,
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
        spec: Parameters.
        stock: Result of the stock side.
        ours: Result of this package's side.
        probe_ms: Step time of each probed stock placement.
        pipeline: Description of this package's pipeline; stock's is TorchRec's SparseDist.
    """

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


def print_comparison(comparison: Comparison) -> None:
    """Prints the table on stdout."""
    config = comparison.spec.config
    stock, ours = comparison.stock, comparison.ours
    print(
        f"\n{_described(config)}, {config.ranks} ranks x "
        f"{config.data.batch_size} samples, {len(stock.losses)} steps, "
        f"{config.data.path or 'generated samples'}"
    )
    if comparison.probe_ms:
        probed = ", ".join(f"{name} {ms:.0f} ms" for name, ms in comparison.probe_ms.items())
        print(f"stock plans probed: {probed}; compared with {stock.placement}")
        if min(comparison.probe_ms, key=lambda name: comparison.probe_ms[name]) != stock.placement:
            print(
                "(column_wise keeps a row-wise Adagrad state per column shard, another optimizer)"
            )
    print(f"pipelines: stock sparse_dist; hot_cold {comparison.pipeline}")
    if not ours.hot_cold_tables:
        print("the planner chose stock tables on both sides; --hot-rows 0 makes all hot/cold")
    rows = [
        ("", f"stock {stock.placement}", "hot_cold", ""),
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
    print_table(*rows)
    if comparison.max_relative_loss_difference > _ROUNDING:
        print(
            "  (sums in another order round differently; a ReLU whose input is that close to 0\n"
            "  switches, and the two runs diverge from there)"
        )
    print("  (times of ranks on one machine; over a slower network bytes matter more)")


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


def write_json(comparison: Comparison, path: Path) -> None:
    """Writes all measurements as JSON."""
    content = {
        "spec": dataclasses.asdict(comparison.spec),
        "probe_ms": dict(comparison.probe_ms),
        "pipeline": comparison.pipeline,
        "stock": dataclasses.asdict(comparison.stock),
        "ours": dataclasses.asdict(comparison.ours),
        "max_relative_loss_difference": comparison.max_relative_loss_difference,
        "sent_bytes_ratio": comparison.sent_bytes_ratio,
        "cpu_ratio": comparison.cpu_ratio,
    }
    write_result(content, path)


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draws the losses of both sides, and the bytes that they sent."""
    from matplotlib.figure import Figure  # slow to import

    stock, ours = comparison.stock, comparison.ours
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    steps = range(1, len(stock.losses) + 1)
    left.plot(steps, stock.losses, color=STOCK_COLOR, linewidth=6, label=f"stock {stock.placement}")
    left.plot(steps, ours.losses, color=OURS_COLOR, linewidth=1.6, label="hot_cold")
    left.set(
        xlabel="step",
        ylabel="loss (mean over ranks)",
        title="Training loss, largest relative difference "
        f"{comparison.max_relative_loss_difference:.0e}",
    )
    sides = [(f"stock\n{stock.placement}", stock, STOCK_COLOR), ("hot_cold", ours, OURS_COLOR)]
    bars = right.bar(
        [name for name, _, _ in sides],
        [_megabytes(side) for _, side, _ in sides],
        color=[color for _, _, color in sides],
        width=0.55,
    )
    right.bar_label(bars, fmt="%.1f MB", padding=3)
    right.margins(y=0.12)
    right.set(
        ylabel="MB sent per rank and step",
        title=f"{change(_megabytes(stock), _megabytes(ours), 'fewer', 'more')} bytes",
    )
    save_picture(figure, path)
