"""Draws timelines: lanes over time, one per in-flight batch and one per kind of exchange.

An exchange of messages is drawn hatched from its posting until its wait returned, since its end
within that time is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_picasso.schedule.schedule import OF_BATCH, Op

if TYPE_CHECKING:
    from torchrec_picasso.app.timeline.timeline import Span, Timeline

_COLORS = {
    "forward": "#4c6ef5",
    "backward": "#f08c00",
    "update, dense step": "#2f9e44",
    "prepare, post": "#adb5bd",
}
_EXCHANGES = {"backward": "dense gradients"}  # DDP posts their sums inside backward
_BATCHES = ("this batch", "next batch", "batch after")
_WAIT_COLOR, _WIRE_COLOR, _STEP_COLOR = "#e03131", "#0b7285", "#495057"
_LETTER_SHARE = 0.006  # of the width; a bar too narrow for its label has none


def draw_timeline(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Draws timelines below each other, on one scale of time.

    Args:
        timelines: By title. Each starts at its own first operation; clocks are not compared.
        path: Picture to write; the suffix determines the format.
    """
    from matplotlib.figure import Figure  # slow to import

    lanes = [_lanes(timeline.spans) for timeline in timelines.values()]
    heights = [0.9 + 0.3 * len(names) for names in lanes]  # inches
    figure = Figure(figsize=(12, 0.8 + sum(heights)), layout="constrained")
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    end_ms = max(_end_ms(timeline.spans) for timeline in timelines.values())
    for axes, (title, timeline), names in zip(rows[:, 0], timelines.items(), lanes):
        _plot(axes, timeline.spans, names)
        axes.set_title(title, loc="left")
    rows[-1, 0].set_xlabel("ms")
    rows[0, 0].set_xlim(0, end_ms)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def _plot(axes: Any, spans: Sequence[Span], lanes: Sequence[str]) -> None:
    end_ms = _end_ms(spans)
    height_of = {name: len(lanes) - 1 - position for position, name in enumerate(lanes)}
    slots = sorted({_slot(span.op) for span in spans if span.kind == "exchange"})
    first_ms: dict[int, float] = {}
    for span in spans:
        lane = height_of[_lane(span)]  # a wait is drawn over its operation
        if span.kind == "wait":
            _bar(axes, span, lane, 0.8, facecolor=_WAIT_COLOR, zorder=3)
        elif span.kind == "exchange":
            _draw_exchange(axes, span, lane, slots)
        else:
            first_ms.setdefault(span.step, span.start_ms)
            _draw_op(axes, span, lane, end_ms)
    for step, at_ms in first_ms.items():
        axes.axvline(at_ms, color=_STEP_COLOR, linewidth=0.8, linestyle=":", zorder=1)
        axes.text(at_ms, len(lanes) - 0.45, f" step {step}", fontsize=8, color=_STEP_COLOR)
    axes.set_yticks(list(height_of.values()), list(height_of), fontsize=8)
    axes.set(xlim=(0, end_ms), ylim=(-0.6, len(lanes) - 0.1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _end_ms(spans: Sequence[Span]) -> float:
    """End of the last operation."""
    return max(span.end_ms for span in spans if span.kind == "compute")


def _lane(span: Span) -> str:
    if span.kind == "exchange":
        return f"wire: {_EXCHANGES.get(span.op.kind, span.op.kind)}"
    return _BATCHES[span.op.batch]


def _lanes(spans: Sequence[Span]) -> list[str]:
    """Names of the lanes from the top: operations by batch, then exchanges in order of posting."""
    exchanges = [span for span in spans if span.kind == "exchange"]
    exchanges.sort(key=lambda span: span.start_ms < 0)  # stable; posted before the first step: last
    ops = {_lane(span) for span in spans if span.kind == "compute"}
    return [*(name for name in _BATCHES if name in ops), *dict.fromkeys(map(_lane, exchanges))]


def _slot(op: Op) -> tuple[int, int]:
    """Chunk and wave of an operation."""
    return op.index or 0, op.wave or 0


def _draw_op(axes: Any, span: Span, lane: float, width_ms: float) -> None:
    kind = span.op.kind
    if kind in ("update", "dense_step"):
        kind = "update, dense step"
    color = _COLORS.get(kind, _COLORS["prepare, post"])
    _bar(axes, span, lane, 0.8, facecolor=color, edgecolor="white", linewidth=0.4, zorder=2)
    label = str(span.op).removesuffix(OF_BATCH[span.op.batch])
    if span.end_ms - span.start_ms > len(label) * _LETTER_SHARE * width_ms:
        middle_ms = (span.start_ms + span.end_ms) / 2
        style = {"ha": "center", "va": "center", "fontsize": 7, "zorder": 4, "clip_on": True}
        axes.text(middle_ms, lane, label, **style)


def _draw_exchange(axes: Any, span: Span, lane: float, slots: Sequence[tuple[int, int]]) -> None:
    """Chunks and waves of an exchange overlap, so each has its own height within the lane."""
    height = 0.8
    if span.op.index is not None or span.op.wave is not None:
        height = 0.8 / len(slots)
        lane += 0.4 - height * (slots.index(_slot(span.op)) + 0.5)
    _bar(axes, span, lane, height, zorder=2, **_exchange_style(span.ends == "waited_for"))


def _bar(axes: Any, span: Span, center: float, height: float, **style: Any) -> None:
    axes.barh(center, span.end_ms - span.start_ms, height, left=span.start_ms, **style)


def _exchange_style(end_is_unknown: bool) -> dict[str, Any]:
    if not end_is_unknown:
        return {"facecolor": _WIRE_COLOR, "edgecolor": "white", "linewidth": 0.4}
    style = {"facecolor": _WIRE_COLOR + "44", "edgecolor": _WIRE_COLOR, "hatch": "////"}
    return {**style, "linewidth": 0.4}


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    posted = "exchange: posted .. waited for (done then or earlier)"
    return [
        *(Patch(facecolor=color, label=name) for name, color in _COLORS.items()),
        Patch(facecolor=_WAIT_COLOR, label="waiting for the wire or another rank"),
        Patch(**_exchange_style(False), label="exchange: posted .. done"),
        Patch(**_exchange_style(True), label=posted),
    ]
