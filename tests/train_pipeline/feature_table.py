"""The table of features in words: what each cell's run was, against TorchRec's own run.

``.venv/bin/python -m tests.train_pipeline.feature_table`` runs it and writes ``docs/features.md``.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.sharding.jobs import assert_same_results
from tests.train_pipeline.feature_cells import Feature, Outcome, run_cell
from tests.train_pipeline.feature_page import PIPELINES, Key, page_of
from tests.train_pipeline.features import FEATURES
from tests.train_pipeline.surface import SURFACE, Entry, idle_streams
from torchrec_picasso.app.launch.run_ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
NUM_RANKS = 2

REFUSALS = ("CompatError: ", "PlanError: ", "ConfigError: ", "InputError: ")
"""How an error of this package begins."""


def _run_features(rank: int) -> dict[Key, list[Outcome]]:
    """Runs cells on this rank: TorchRec's, ours under SparseDist, ours interleaved."""
    found: dict[Key, list[Outcome]] = {}
    for feature in FEATURES:
        for kind in feature.kinds:
            ours = [
                run_cell(feature, kind, rank, True, number)
                for number in (0, feature.num_micro_batches)
            ]
            if "num_micro_batches=1" in ours[1].error:  # what the error tells to do
                ours.append(run_cell(feature, kind, rank, True, 1))
            is_needed = not all(outcome.error.startswith(REFUSALS) for outcome in ours)
            stock = _witness(feature, kind, rank) if is_needed else Outcome()
            found[feature.name, kind] = [stock, *ours]
    return found


def _witness(feature: Feature, kind: str, rank: int) -> Outcome:
    if feature.witness is not None:
        return feature.witness(feature, kind, rank)
    return run_cell(feature, kind, rank, False, 0)


class DiffersError(AssertionError):
    """A run that is not TorchRec's."""


def words(feature: Feature, by_rank: Sequence[Sequence[Outcome]]) -> dict[tuple[str, str], str]:
    """Cells by pipeline and by what is done; of each rank TorchRec's outcome, then both of ours."""
    stock, sparse_dist, interleaved, *whole_batches = zip(*by_rank)
    cells: dict[tuple[str, str], str] = {}
    for pipeline, runs in zip(PIPELINES, (sparse_dist, interleaved)):
        note = ""
        if runs[0].error and pipeline == "Interleaved" and whole_batches:
            note = f"micro-batches refused: {_first_sentence(runs[0].error)}"
            (runs,) = whole_batches
        for phase in ("train", "eval"):
            cells[pipeline, phase] = _word(feature, phase, runs, stock, note)
    return cells


def _word(
    feature: Feature, phase: str, runs: Sequence[Outcome], stock: Sequence[Outcome], note: str
) -> str:
    errors = [run.error for run in runs]
    if all(error.startswith(REFUSALS) for error in errors):
        return f"refused: {_first_sentence(errors[0])}"
    if any(errors):
        if errors != [run.error for run in stock]:
            raise DiffersError(f"{feature.name}: an error without a name on some rank: {errors}")
        return f"fails: {_first_sentence(errors[0])}"
    if stock[0].error:
        raise DiffersError(f"TorchRec itself does not run it ({stock[0].error[:300]}), ours does")
    _compare(feature, phase, runs, stock)
    summary = runs[0].summary
    notes = [note] if note else []
    notes += [_plain(line) for line in summary.splitlines() if ": interleaved" not in line]
    notes = [text for text in notes if text]
    if notes and not any(": interleaved" in line for line in summary.splitlines()):
        return f"stock path: {'; '.join(notes)}"
    return f"works; {'; '.join(notes)}" if notes else "works"


def _plain(line: str) -> str:
    """What a line of the summary says of a module, or of micro-batches."""
    if ": computed once per batch" in line or ": not pipelined" in line:
        return line.replace(", of its exchange only that of ids is hidden", "")
    _, found, why = line.partition("; no more than 1 because ")
    return f"1 micro-batch because {_first_sentence(why)}" if found else ""


def _first_sentence(text: str) -> str:
    for end in ("\n", "; ", ". "):
        text = text.split(end)[0]
    return " ".join(text.split()).rstrip(".")


def _compare(
    feature: Feature, phase: str, runs: Sequence[Outcome], stock: Sequence[Outcome]
) -> None:
    how = {"rtol": feature.rtol, "atol": feature.atol}
    given = "evaluated" if phase == "eval" else "trained"
    try:
        mine, its = ([list(getattr(of, given)) for of in outcomes] for outcomes in (runs, stock))
        torch.testing.assert_close(mine, its, **how)
        if phase == "train":
            left, expected = ([of.result for of in outcomes] for outcomes in (runs, stock))
            assert_same_results(left, expected, **how)
    except AssertionError as error:
        raise DiffersError(f"{feature.name}, {phase}: {error}") from error


@dataclass(frozen=True)
class Ran:
    """What an entry of the surface came to on a rank."""

    given: Any = None
    error: str = ""


def _run_surface(rank: int) -> dict[str, list[Ran]]:
    """Of each entry TorchRec's run, if any, and ours; first TorchRec's without idle streams."""
    found: dict[str, list[Ran]] = {}
    for entry in SURFACE:
        whose = [True] if entry.is_ours_alone else [False, True]
        found[entry.name] = [_ran(entry, rank, is_ours=False)] if entry.on_idle_streams else []
        with idle_streams() if entry.on_idle_streams else contextlib.nullcontext():
            found[entry.name] += [_ran(entry, rank, is_ours=is_ours) for is_ours in whose]
    return found


def _ran(entry: Entry, rank: int, *, is_ours: bool) -> Ran:
    try:
        return Ran(given=entry.run(rank, is_ours))
    except Exception as error:  # what a cell tells
        return Ran(error=f"{type(error).__name__}: {error}")


def surface_words(entry: Entry, by_rank: Sequence[Sequence[Ran]]) -> tuple[str, str]:
    """An entry's cells: TorchRec's tables, and hot/cold ones."""
    *before, ours = zip(*by_rank)
    errors = [ran.error for ran in ours]
    if all(error.startswith(REFUSALS) for error in errors):
        stock_word = _stock_word(before[0]) if before else "-"
        return stock_word, f"refused: {_first_sentence(errors[0])}"
    if entry.is_ours_alone:
        raise DiffersError(f"{entry.name}: not refused by name on all ranks: {errors}")
    *alone, stock = before
    if any(errors):
        if errors != [ran.error for ran in stock]:
            raise DiffersError(f"{entry.name}: an error without a name on some rank: {errors}")
        return _stock_word(stock), f"fails: {_first_sentence(errors[0])}"
    for mine, its in zip(ours, stock):
        if its.error:
            raise DiffersError(f"{entry.name}: TorchRec itself does not run it: {its.error[:300]}")
        try:
            torch.testing.assert_close(mine.given, its.given, rtol=1e-4, atol=2e-5)
        except AssertionError as error:
            raise DiffersError(f"{entry.name}: {error}") from error
    if not alone:
        return "works", "works"
    if not all(ran.error for ran in alone[0]):
        raise DiffersError(f"{entry.name}: TorchRec's own needs no idle streams any more")
    return _stock_word(alone[0]), "works on idle streams"


def _stock_word(ran: Sequence[Ran]) -> str:
    return f"fails: {_first_sentence(ran[0].error)}" if ran[0].error else "works"


def _run(rank: int, world_size: int) -> tuple[dict[Key, list[Outcome]], dict[str, list[Ran]]]:
    return _run_features(rank), _run_surface(rank)


def run_all() -> tuple[dict[Key, dict[tuple[str, str], str]], dict[str, tuple[str, str]]]:
    """Runs every cell and every entry of the surface and puts them into words."""
    features, surface = zip(*run_ranks(_run, NUM_RANKS, timeout_s=280))
    cells = {
        (feature.name, kind): words(feature, [found[feature.name, kind] for found in features])
        for feature in FEATURES
        for kind in feature.kinds
    }
    entries = {
        entry.name: surface_words(entry, [found[entry.name] for found in surface])
        for entry in SURFACE
    }
    return cells, entries


if __name__ == "__main__":
    PAGE.write_text(page_of(*run_all()))
