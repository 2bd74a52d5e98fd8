"""Figures and verdicts of a soak: pure functions of the results of both sides' ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.reliability.process_figures import FIGURES, slope
from benchmarks.reliability.soak_side import Found

MOST_APART = 1e-4
"""Relative difference of losses, and of weights to the largest of their tensor. Sums of another
order part two trainings by some 1e-7 a step, which a smooth model does not amplify: after 2,000
steps 4e-6 are seen. One row updated once too often is 1e-3 and more."""

_MOST_GROWN = {"rss_kib": 1024.0, "heap_kib": 512.0, "objects": 100.0, "tensors": 50.0}
"""Over the second half of the steps, by the slope, and beyond stock's. Resident memory creeps up
under stock too, ever more slowly, as freed blocks of odd sizes lie between others; what is in use
varies by what a step happens to hold."""

_CURVE_AT = (100, 500, 1000, 2000, 5000, 10_000, 20_000)
_STEPS_A_REFRESH = 50


def judge(ours: Sequence[Found], stock: Sequence[Found]) -> dict[str, Any]:
    """Compares the sides.

    Returns:
        For JSON: figures, ``lines`` that sum them up, and ``failed``, a sentence for each thing
        that is not as it should be.
    """
    losses = _losses_apart(ours, stock)
    weights = _weights_apart(ours[0].state, stock[0].state)
    sides = {name: _side(found) for name, found in (("ours", ours), ("stock", stock))}
    figures: dict[str, Any] = {
        "losses": losses,
        "weights_apart_at_most": max(weights.values()),
        "weights_compared": len(weights),
        **sides,
    }
    failed = [
        *_apart("losses", losses["largest_difference"]),
        *_apart("losses of evaluations", losses["largest_in_evaluations"]),
        *(message for name, apart in weights.items() for message in _apart(name, apart)),
        *_grown(sides["ours"], sides["stock"]),
        *_not_as_told(ours, stock),
        *_left_over(ours, stock),
    ]
    return {"failed": failed, "lines": list(_lines(figures)), **figures}


def _losses_apart(ours: Sequence[Found], stock: Sequence[Found]) -> dict[str, Any]:
    ours_L, stock_L = (_losses(sum(found.errors for found in side)) for side in (ours, stock))
    apart_L = ((ours_L - stock_L).abs() / stock_L).nan_to_num(nan=torch.inf)
    had_samples_L = stock_L.isfinite()
    apart_L[~had_samples_L & ~ours_L.isfinite()] = 0.0  # a step without samples on any rank
    num_steps = len(apart_L)
    evaluated = [
        _losses(sum(torch.tensor(found.evaluations, dtype=torch.float64) for found in side))
        for side in (ours, stock)
    ]
    return {
        "compared": int(had_samples_L.sum()),
        "largest_difference": float(apart_L.max()),
        "largest_by_step": {
            step: float(apart_L[:step].max()) for step in _CURVE_AT if step <= num_steps
        },
        "largest_near_step": {
            step: float(apart_L[max(0, step - 50) : step].max())
            for step in _CURVE_AT
            if step <= num_steps
        },
        "largest_in_evaluations": float(((evaluated[0] - evaluated[1]).abs() / evaluated[1]).max()),
        "first": float(stock_L[:20].nanmean()),
        "last": float(stock_L[-20:].nanmean()),
    }


def _losses(errors: Any) -> Tensor:
    """Mean squared errors, of sums over samples and their numbers."""
    return errors[:, 0] / errors[:, 1]


def _weights_apart(ours: Mapping[str, Tensor], stock: Mapping[str, Tensor]) -> dict[str, float]:
    """By tensor, the largest difference as a part of the largest element."""
    apart = dict.fromkeys(ours.keys() ^ stock.keys(), torch.inf)
    for name in ours.keys() & stock.keys():
        difference = (ours[name].double() - stock[name].double()).abs().max()
        apart[name] = float(difference / stock[name].abs().max().double().clamp(min=1e-12))
    return apart


def _apart(what: str, apart: float) -> Iterator[str]:
    if not apart <= MOST_APART:
        yield f"{what}: {apart:.1e} from stock's, expected {MOST_APART:.0e} at most"


def _side(side: Sequence[Found]) -> dict[str, Any]:
    """Figures of one side; those of growth by rank."""
    looks = [found.samples for found in side]
    second_half = [look[len(look) // 2 :] for look in looks]
    return {
        **{name: count for name, count in sorted(side[0].counts.items()) if name != "samples"},
        "samples": sum(found.counts["samples"] for found in side),
        "steps": len(side[0].errors),
        "evaluations": len(side[0].evaluations),
        "ends_of_data": len(side[0].ends),
        "setting": side[0].setting,
        "seconds": round(side[0].seconds, 1),
        "measured_steps": int(second_half[0][-1, 0] - second_half[0][0, 0]),
        "slope_by_rank": {
            name: [slope(look[:, 0].tolist(), look[:, column].tolist()) for look in second_half]
            for column, name in enumerate(FIGURES, start=1)
        },
        "looks_of_first_rank": {
            name: looks[0][:, column].tolist() for column, name in enumerate(("step", *FIGURES))
        },
        "held_by_rank": [found.held for found in side],
        "tensors_kept_by_rank": [found.tensors_kept for found in side],
    }


def _grown(ours: Mapping[str, Any], stock: Mapping[str, Any]) -> Iterator[str]:
    """Figures that grow, and more than stock's."""
    for name, most in _MOST_GROWN.items():
        slope_of_stock = max(0.0, *stock["slope_by_rank"][name])
        for rank, own_slope in enumerate(ours["slope_by_rank"][name]):
            if (own_slope - slope_of_stock) * ours["measured_steps"] > most:
                yield (
                    f"rank {rank}: {name} grows by {own_slope:.3f} a step, "
                    f"stock's by {slope_of_stock:.3f}"
                )


def _not_as_told(ours: Sequence[Found], stock: Sequence[Found]) -> Iterator[str]:
    """Broken promises of pipeline, checkpoints and replicas."""
    for rank, found in enumerate(ours):
        if found.ends != stock[0].ends:
            yield f"rank {rank}: data ended after {found.ends} steps, expected {stock[0].ends}"
        if found.differing_homes:
            yield f"rank {rank}: {found.differing_homes}"
        if found.counts["replicas"] == 0:
            yield f"rank {rank}: no replica was compared with its home"
    for name, side in (("ours", ours), ("stock", stock)):
        if side[0].reloads_unlike:
            yield f"{name}: other state after a reload: {', '.join(side[0].reloads_unlike)}"
    refreshes, steps = ours[0].counts["refreshes"], len(ours[0].errors)
    if refreshes < steps // _STEPS_A_REFRESH:
        yield f"{refreshes} refreshes moved rows, expected {steps // _STEPS_A_REFRESH} at least"


def _left_over(ours: Sequence[Found], stock: Sequence[Found]) -> Iterator[str]:
    """Resources held longer than they should be."""
    for rank, (found, in_stock) in enumerate(zip(ours, stock, strict=True)):
        for kind in ("descriptors", "threads"):
            more = found.held["end"][kind] - found.held["warm"][kind]
            if more:
                yield f"rank {rank}: {kind} more than after the warm-up: {_named(more)}"
            more = found.held["after"][kind] - in_stock.held["after"][kind]
            if more:
                yield f"rank {rank}: {kind} left over that stock does not leave: {_named(more)}"
        kept, kept_in_stock = found.tensors_kept, in_stock.tensors_kept
        if kept > kept_in_stock:
            yield f"rank {rank}: {kept} tensors left, by stock {kept_in_stock}"
        if found.alive_after:
            yield f"rank {rank}: still alive after it was dropped: {', '.join(found.alive_after)}"


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Summary lines for a reader."""
    ours, stock, losses = figures["ours"], figures["stock"], figures["losses"]
    yield (
        f"{ours['steps']} steps, {ours['samples']} samples, {ours['evaluations']} evaluations, "
        f"{ours.get('checkpoints', 0)} + {ours.get('async_checkpoints', 0)} checkpoints, "
        f"{ours.get('reloads', 0)} reloaded; {ours.get('refreshes', 0)} refreshes moved "
        f"{ours.get('moved_rows', 0)} rows"
    )
    curve = ", ".join(f"{apart:.1e} by {step}" for step, apart in losses["largest_by_step"].items())
    yield (
        f"{losses['compared']} losses, from {losses['first']:.3f} to {losses['last']:.3f}: at most "
        f"{losses['largest_difference']:.1e} from stock's ({curve}); weights and optimizer state "
        f"{figures['weights_apart_at_most']:.1e}"
    )
    for name in _MOST_GROWN:
        mine, stocks = (max(side["slope_by_rank"][name]) for side in (ours, stock))
        yield f"{name}: {mine:+.3f} a step over {ours['measured_steps']}, stock {stocks:+.3f}"
    for kind in ("descriptors", "threads"):
        counts = [
            " / ".join(str(sum(side["held_by_rank"][0][when][kind].values())) for when in _WHEN)
            for side in (ours, stock)
        ]
        yield f"{kind} {' / '.join(_WHEN)}: {counts[0]}, stock {counts[1]}"
    yield f"{ours['seconds']} s, stock {stock['seconds']} s; {ours['setting']}"


_WHEN = ("before", "warm", "end", "after")
