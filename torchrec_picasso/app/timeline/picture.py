"""A picture of timelines: lanes over time, one for each batch's operations and for each exchange.

It claims no more than was measured: an exchange of messages is drawn hatched from its posting until
its wait returned, since when within that time it was done is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_picasso.app.timeline.spans import (
    COMPUTE,
    EXCHANGE,
    WAIT,
    WAITED_FOR,
    HasSpans,
    Span,
)
from torchrec_picasso.schedule.schedule import OF_BATCH, Op

__all__ = ["draw_timeline", "plot_timeline"]

_COLORS = {
    "forward": "#4c6ef5",
    "backward": "#f08c00",
    "update, dense step": "#2f9e44",
    "prepare, post": "#adb5bd",
}
_EXCHANGES = {"backward": "dense gradients"}  # DDP posts their sums inside backward
_BATCHES = ("this batch", "next batch", "batch after")
_WAIT_COLOR, _WIRE_COLOR = "#e03131", "#0b7285"
_LETTER_SHARE = 0.006  # of the width; a bar too narrow for its name is not named


def draw_timeline(timelines: Mapping[str, HasSpans], path: str | Path) -> None:
    """Writes a picture of timelines under each other, all on one scale of time.

    Args:
        timelines: By title, such as a rank or a contestant. Each starts at its own first operation;
            clocks are not compared.
        path: Its name says the format.
    """
    from matplotlib.figure import Figure  # here, because only a picture needs it; slow to import

    heights = [_height(timeline) for timeline in timelines.values()]
    figure = Figure(figsize=(12, 0.8 + sum(heights)), layout="constrained")
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (title, timeline) in zip(rows[:, 0], timelines.items()):
        plot_timeline(timeline, axes, with_legend=False)
        axes.set_title(title, loc="left")
    for axes in rows[:-1, 0]:
        axes.set_xlabel("")
    rows[0, 0].set_xlim(0, max(_end_ms(timeline) for timeline in timelines.values()))
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def plot_timeline(timeline: HasSpans, axes: Any, with_legend: bool = True) -> None:
    """Draws a timeline into axes.

    Args:
        timeline: Of one rank.
        axes: Of matplotlib.
        with_legend: Whether to explain the colours, below the axes.
    """
    end_ms = _end_ms(timeline)
    lanes = _lanes(timeline)
    place = {name: len(lanes) - 1 - position for position, name in enumerate(lanes)}
    slots = _slots(timeline)
    for span in timeline.spans:
        if span.kind == COMPUTE:
            _draw_op(axes, span, place[_lane(span)], end_ms)
        elif span.kind == EXCHANGE:
            _draw_exchange(axes, span, place[_lane(span)], slots)
    for span in timeline.spans:
        if span.kind == WAIT:
            _bar(axes, span, place[_lane(span)], 0.8, facecolor=_WAIT_COLOR, zorder=3)
    steps: dict[int, float] = {}
    for span in timeline.spans:
        if span.kind == COMPUTE:
            steps.setdefault(span.step, span.start_ms)
    for step, at_ms in steps.items():
        axes.axvline(at_ms, color="#495057", linewidth=0.8, linestyle=":", zorder=1)
        axes.text(at_ms, len(lanes) - 0.45, f" step {step}", fontsize=8, color="#495057")
    axes.set_yticks(list(place.values()), list(place), fontsize=8)
    axes.set(xlabel="ms", xlim=(0, end_ms), ylim=(-0.6, len(lanes) - 0.1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    if with_legend:
        axes.legend(
            handles=_legend(),
            loc="upper center",
            bbox_to_anchor=(0.5, -0.18),
            ncols=3,
            frameon=False,
            fontsize=8,
        )


def _height(timeline: HasSpans) -> float:
    """Inches."""
    return 0.9 + 0.3 * len(_lanes(timeline))


def _end_ms(timeline: HasSpans) -> float:
    """End of the last operation."""
    return max(span.end_ms for span in timeline.spans if span.kind == COMPUTE)


def _lane(span: Span) -> str:
    if span.kind == EXCHANGE:
        return f"wire: {_EXCHANGES.get(span.op.kind, span.op.kind)}"
    return _BATCHES[span.op.batch]


def _lanes(timeline: HasSpans) -> list[str]:
    """Names of the lanes, the first on top: operations, then exchanges as they are posted."""
    wire = dict.fromkeys(
        _lane(span)
        for posted_before in (False, True)
        for span in timeline.spans
        if span.kind == EXCHANGE and (span.start_ms < 0) == posted_before
    )
    ops = dict.fromkeys(_lane(span) for span in timeline.spans if span.kind == COMPUTE)
    return [*(name for name in _BATCHES if name in ops), *wire]


def _draw_op(axes: Any, span: Span, lane: int, width_ms: float) -> None:
    color = _COLORS[_group(span.op.kind)]
    _bar(axes, span, lane, 0.8, facecolor=color, edgecolor="white", linewidth=0.4, zorder=2)
    label = str(span.op).removesuffix(OF_BATCH[span.op.batch])
    if span.end_ms - span.start_ms > len(label) * _LETTER_SHARE * width_ms:
        axes.text(
            (span.start_ms + span.end_ms) / 2,
            lane,
            label,
            ha="center",
            va="center",
            fontsize=7,
            zorder=4,
            clip_on=True,
        )


_Part = tuple[int, int]
"""Chunk and wave of an operation."""


def _part(op: Op) -> _Part:
    return op.index or 0, op.wave or 0


def _slots(timeline: HasSpans) -> list[_Part]:
    """The chunks and waves that exchanges carry, in order."""
    return sorted({_part(span.op) for span in timeline.spans if span.kind == EXCHANGE})


def _draw_exchange(axes: Any, span: Span, lane: int, slots: Sequence[_Part]) -> None:
    """Chunks and waves of an exchange overlap, so each has its own height within the lane."""
    height, center = 0.8, float(lane)
    if span.op.index is not None or span.op.wave is not None:
        height = 0.8 / len(slots)
        center = lane + 0.4 - height * (slots.index(_part(span.op)) + 0.5)
    style = _waited_style() if span.ends == WAITED_FOR else _done_style()
    _bar(axes, span, center, height, zorder=2, **style)


def _bar(axes: Any, span: Span, center: float, height: float, **style: Any) -> None:
    axes.barh(center, span.end_ms - span.start_ms, height, left=span.start_ms, **style)


def _done_style() -> dict[str, Any]:
    return {"facecolor": _WIRE_COLOR, "edgecolor": "white", "linewidth": 0.4}


def _waited_style() -> dict[str, Any]:
    return {
        "facecolor": _WIRE_COLOR + "44",
        "edgecolor": _WIRE_COLOR,
        "hatch": "////",
        "linewidth": 0.4,
    }


def _group(kind: str) -> str:
    if kind in ("update", "dense_step"):
        return "update, dense step"
    return kind if kind in _COLORS else "prepare, post"


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    return [
        *(Patch(facecolor=color, label=name) for name, color in _COLORS.items()),
        Patch(facecolor=_WAIT_COLOR, label="waiting for the wire or another rank"),
        Patch(**_done_style(), label="exchange: posted .. done"),
        Patch(**_waited_style(), label="exchange: posted .. waited for (done then or earlier)"),
    ]
