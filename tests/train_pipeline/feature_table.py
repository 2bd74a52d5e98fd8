"""The table of features in words: what each cell's run was, against TorchRec's own run.

``.venv/bin/python -m tests.train_pipeline.feature_table`` runs it and writes ``docs/features.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.proof.proved_models import table
from tests.sharding.jobs import whole
from tests.train_pipeline.feature_cells import Feature, Outcome, run_cell
from tests.train_pipeline.features import FEATURES
from tests.train_pipeline.surface import SURFACE, Entry, idle_streams
from torchrec_picasso.app.launch.run_ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
KINDS = {"bags": "EmbeddingBagCollection", "sequences": "EmbeddingCollection"}
NUM_RANKS = 2

Key = tuple[str, str]
"""Name of a feature and kind of collection."""

HEAD = """\
# What works

A run made this page, cell by cell: `python -m tests.train_pipeline.feature_table` writes it, and
`tests/train_pipeline/test_feature_table.py` fails where a run says otherwise. A cell is a model on
2 ranks on CPU, trained for 3 steps and then evaluated, beside stock TorchRec from the same weights
on the same batches. What is refused in training does not come to its evaluation.

- **works**: predictions, table weights, optimizer state and dense weights are TorchRec's, to
  rounding; where a number follows, with what is said below.
  *Beside an unsharded model* they are that one's: FBGEMM has no CPU kernel for the optimizer, and
  its formulas update whole tables there.
- **refused**: an error of this package says so by name, on all ranks; how it begins is below.
- **stock path**: equal as well, but computed once per batch without interleaving; why is below.
- **fails**: TorchRec's own run on the CPU ends in the same error; it is below.

*SparseDist* is TorchRec's `TrainPipelineSparseDist` over hot/cold tables, *Interleaved* is
`InterleavedTrainPipeline`: with 3 micro-batches asked for, with 1 where 3 are refused, unless
the line says otherwise.
"""


SURFACE_HEAD = """\
## The rest of TorchRec's surface

Other pipelines, wrappers, modules, kernels and flags, first with TorchRec's tables, then with
hot/cold ones, both kinds of collections where it matters; compared is what the tables above
compare, or what the entry is about. *Planned* is a table named in `hot_rows` of `hot_cold_planner`,
*placed* one with `HotColdParams` in a plan made by hand. A pipeline that needs a GPU's streams
**works on idle streams**: on the CPU, beside TorchRec's own, with streams that do nothing.

| feature | TorchRec's tables | hot/cold tables |
|---|---|---|"""

REFUSALS = ("CompatError: ", "PlanError: ", "ConfigError: ", "InputError: ")
"""How an error of this package begins."""


def run_features(
    rank: int, world_size: int, features: Sequence[Feature]
) -> dict[Key, list[Outcome]]:
    """Runs cells on this rank: TorchRec's, ours under SparseDist, ours interleaved; for the
    launcher."""
    found: dict[Key, list[Outcome]] = {}
    for feature in features:
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
    """A feature's cells, by pipeline and by what is done.

    Args:
        feature: Which.
        by_rank: Outcomes as :func:`run_features` gives them, of each rank.

    Raises:
        DiffersError: If something trained that TorchRec trains otherwise.
    """
    stock, sparse_dist, interleaved, *whole_batches = zip(*by_rank)
    cells: dict[tuple[str, str], str] = {}
    for pipeline, runs in (("SparseDist", sparse_dist), ("Interleaved", interleaved)):
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
    try:
        for mine, its in zip(runs, stock):
            assert mine.result is not None
            assert its.result is not None
            if phase == "eval":
                torch.testing.assert_close(list(mine.evaluated), list(its.evaluated), **how)
                continue
            torch.testing.assert_close(list(mine.trained), list(its.trained), **how)
            torch.testing.assert_close(mine.result.dense, its.result.dense, **how)
        if phase == "train":
            for kind in ("weights", "states"):
                torch.testing.assert_close(
                    *(whole([o.result for o in of], kind) for of in (runs, stock)),  # type: ignore[misc]
                    **how,
                )
    except AssertionError as error:
        raise DiffersError(f"{feature.name}, {phase}: {error}") from error


@dataclass(frozen=True)
class Ran:
    """What an entry of the surface came to on a rank."""

    given: Any = None
    error: str = ""


def run_surface(rank: int, world_size: int) -> dict[str, list[Ran]]:
    """Runs every entry on this rank; for the launcher.

    Returns:
        Of each entry TorchRec's run, where there is one, and ours; on idle streams, where these are
        needed, behind TorchRec's run without.
    """
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
    """An entry's cells: TorchRec's tables, and hot/cold ones.

    Raises:
        DiffersError: If something came out otherwise, or an error has no name.
    """
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


def run_all_surface() -> dict[str, tuple[str, str]]:
    """Runs every entry and puts it into words."""
    by_rank = run_ranks(run_surface, NUM_RANKS, timeout_s=300)
    return {
        entry.name: surface_words(entry, [found[entry.name] for found in by_rank])
        for entry in SURFACE
    }


def run_all(features: Sequence[Feature] = FEATURES) -> dict[Key, dict[tuple[str, str], str]]:
    """Runs every cell and puts it into words."""
    by_rank = run_ranks(run_features, NUM_RANKS, list(features), timeout_s=300)
    cells: dict[Key, dict[tuple[str, str], str]] = {}
    for feature in features:
        for kind in feature.kinds:
            cells[feature.name, kind] = words(
                feature, [found[feature.name, kind] for found in by_rank]
            )
    return cells


def page_of(
    cells: Mapping[Key, Mapping[tuple[str, str], str]], surface: Mapping[str, tuple[str, str]]
) -> str:
    """The page, a table for each kind of collection and one of the surface; what is long is below
    its table."""
    parts = [HEAD, table() + "\n"]
    for kind, title in KINDS.items():
        notes: dict[str, int] = {}
        lines = [
            f"## {title}\n",
            "| feature | SparseDist, train | SparseDist, eval | Interleaved, train | "
            "Interleaved, eval |",
            "|---|---|---|---|---|",
        ]
        for (name, of_kind), by_column in cells.items():
            if of_kind == kind:
                texts = [_short(text, notes) for text in by_column.values()]
                lines.append(f"| {name} | {' | '.join(texts)} |")
        lines.append("")
        lines += [f"{number}. {text}" for text, number in notes.items()]
        parts.append("\n".join(lines) + "\n")
    parts.append(_surface_page(surface))
    return "\n".join(parts)


def _surface_page(surface: Mapping[str, tuple[str, str]]) -> str:
    notes: dict[str, int] = {}
    lines = [SURFACE_HEAD]
    for name, texts in surface.items():
        lines.append(f"| {name} | {' | '.join(_short(text, notes) for text in texts)} |")
    lines.append("")
    lines += [f"{number}. {text}" for text, number in notes.items()]
    return "\n".join(lines) + "\n"


def _short(text: str, notes: dict[str, Any]) -> str:
    for word in ("refused", "stock path", "fails", "works"):
        head, found, rest = text.partition(": " if word != "works" else "; ")
        if head == word and found:
            return f"{word} ({notes.setdefault(rest, len(notes) + 1)})"
    return text


if __name__ == "__main__":
    PAGE.write_text(page_of(run_all(), run_all_surface()))
