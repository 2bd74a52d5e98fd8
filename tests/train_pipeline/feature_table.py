"""The table of features in words: what each cell's run was, against TorchRec's own run.

``.venv/bin/python -m tests.train_pipeline.feature_table`` runs it and writes ``docs/features.md``.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.proof.proved_models import table
from tests.sharding.jobs import assert_same_results
from tests.support.hosts import pretend_hosts
from tests.train_pipeline.feature_cells import Feature, Outcome, run_cell
from tests.train_pipeline.features import FEATURES
from tests.train_pipeline.surface import SURFACE, Entry, idle_streams
from torchrec_picasso.app.launch.run_ranks import run_ranks

KINDS = {"bags": "EmbeddingBagCollection", "sequences": "EmbeddingCollection"}
PIPELINES = ("SparseDist", "Interleaved")

Key = tuple[str, str]
"""Name of a feature and kind of collection."""
Texts = tuple[str, ...]
"""A cell's text in each column."""

HEAD = """\
# What works

Features of TorchRec with hot/cold tables: runs of 3 steps and an evaluation on 2 CPU ranks (by
host 4) beside stock TorchRec (`python -m tests.train_pipeline.feature_table`).

- **works**: predictions, weights and optimizer state equal TorchRec's up to rounding;
  *(unsharded)*: an unsharded model's, since FBGEMM has no CPU kernel.
- **stock path**: equal, but computed once per batch.
- **refused**: a `CompatError`, while planning a `PlanError`, on all ranks.
- **fails**: TorchRec's own run on the CPU ends in the same error.
"""

FEATURES_HEAD = """\
## Collections

Of two results the second is `InterleavedTrainPipeline`'s, with 3 micro-batches, or 1 where 3 are
refused, the first `TrainPipelineSparseDist`'s."""

SURFACE_HEAD = """\
## Other parts of TorchRec

Of two results the first is with TorchRec's tables. *Planned*: `hot_rows` of `hot_cold_planner`
names the table; *placed*: a plan by hand has `HotColdParams`. *Idle streams*, instead of a GPU's,
do nothing."""

LABELS = {"works": "works, not interleaved in full"}
"""What the page calls a result that has a reason."""

SHORTER = (
    (r"\b(Compat|Plan|Config|Input)Error: ", ""),
    (r"^micro-batches refused: ", "1 micro-batch: "),
    (r"; tables: not pipelined: .*", ""),
    (r"\btables( \(stock tables\))?: (its )?", ""),
    (r"\bmore_tables: computed once per batch: .*, with", "the other tables take"),
    (r"in 3 micro-batches the (.*) of tables differs by .*", r"the \1 of tables differs"),
    (r"^hot_rows names table .* whose sharder \w+", "its sharder"),
    (r"^hot_rows names table '\w+', which cannot be hot/cold: ", ""),
    (r"^hot/cold tables? ('\w+'(, )?)+:? ?", ""),
    (r"^has compute kernel '\w+'", "not a kernel of hot/cold tables"),
    (r"is to be (sharded without the name of its module), as inside .*", r"\1"),
    (r", or another one than the batch, so samples cannot be cut into micro-batches", ""),
    (r" between the input dist .* form='bags', whose", " after the input dist: bags'"),
    (r"(compiled autograd), which traces .*", r"\1"),
)
"""Patterns in reasons, and what the page has for them: names of the runs' tables say nothing."""


def page_of(
    cells: Mapping[Key, Mapping[tuple[str, str], str]], surface: Mapping[str, Texts]
) -> str:
    """The page: what is cut, the features of collections, the other parts of TorchRec."""
    texts = {
        key: tuple(_both(by[pipeline, "train"], by[pipeline, "eval"]) for pipeline in PIPELINES)
        for key, by in cells.items()
    }
    return "\n".join(
        [
            HEAD,
            table() + "\n",
            f"{FEATURES_HEAD}\n\n{_works_by_kind(texts)}\n\n{_rest(_labelled(texts))}",
            f"{SURFACE_HEAD}\n\n{_works(surface)}\n\n{_rest(surface)}",
        ]
    )


def _both(trained: str, evaluated: str) -> str:
    return trained if trained == evaluated else f"{trained}; evaluation: {evaluated}"


def _do_all_work(texts: Texts) -> bool:
    return set(texts) == {"works"}


def _works(lines: Mapping[str, Texts]) -> str:
    return f"Works: {folded([name for name, texts in lines.items() if _do_all_work(texts)])}."


def _works_by_kind(texts: Mapping[Key, Texts]) -> str:
    """Three lists: what works for both kinds of collections, and for one of them only."""
    kinds: dict[str, list[str]] = {}
    for (name, kind), columns in texts.items():
        if _do_all_work(columns):
            kinds.setdefault(name, []).append(kind)
    lines = []
    for wanted, whose in (
        (list(KINDS), "both"),
        *(([kind], f"{title} ({kind})") for kind, title in KINDS.items()),
    ):
        names = [name for name, works_for in kinds.items() if works_for == wanted]
        lines.append(f"- Works, {whose}: {folded(names)}.")
    return "\n".join(lines)


def _labelled(texts: Mapping[Key, Texts]) -> dict[str, Texts]:
    """Lines by name, with the kind of collection where the two differ."""
    by_name: dict[str, dict[str, Texts]] = {}
    for (name, kind), columns in texts.items():
        by_name.setdefault(name, {})[kind] = columns
    lines = {}
    for name, by_kind in by_name.items():
        differ = len(set(map(_result_and_reason, by_kind.values()))) > 1
        for kind, columns in by_kind.items():
            lines[f"{name} ({kind})" if differ else name] = columns
    return lines


def _rest(lines: Mapping[str, Texts]) -> str:
    """Returns what does not work in all columns, by result; equal ends are one line."""
    names: dict[str, dict[str, list[str]]] = {}
    for name, texts in lines.items():
        if not _do_all_work(texts):
            result, reason = _result_and_reason(texts)
            names.setdefault(result, {}).setdefault(reason, []).append(name)
    parts = []
    for result, by_reason in names.items():
        bullets = "".join(_bullet(folded(each), reason) for reason, each in by_reason.items())
        parts.append(f"**{LABELS.get(result, result)}**\n\n{bullets}")
    return "\n".join(parts)


def _bullet(names: str, reason: str) -> str:
    return f"- {names}: {reason.removeprefix(f'{names} ')}\n"


def _result_and_reason(texts: Texts) -> tuple[str, str]:
    results, reasons = [], []
    for text in texts:
        result, _, reason = re.split("(: |; |$)", text, maxsplit=1)
        results.append(result)
        reasons.append(shorter(reason))
    results = [result for result in results if result != "-"]  # TorchRec has nothing to run
    return " / ".join(_once(results)), "; ".join(filter(None, _once(reasons)))


def shorter(reason: str) -> str:
    """A reason without what only the run knows."""
    for pattern, replacement in SHORTER:
        reason = re.sub(pattern, replacement, reason)
    return reason


def _once(texts: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(texts)]


def folded(names: Sequence[str]) -> str:
    """Names in a list; ``a, b`` and ``a, c`` become ``a (b; c)``, planned and placed become one."""
    rests: dict[str, list[str]] = {}
    for name in names:
        head, _, rest = name.partition(", ")
        rests.setdefault(head, []).append(rest)
    words = []
    for head, rests_of_head in rests.items():
        if rests_of_head == ["planned", "placed"] or rests_of_head == [""]:
            words.append(head)
        elif len(rests_of_head) == 1:
            words.append(f"{head}, {rests_of_head[0]}")
        else:
            words.append(f"{head} ({'; '.join(rest or 'alone' for rest in rests_of_head)})")
    return "; ".join(words)


PAGE = Path(__file__).parents[2] / "docs" / "features.md"
NUM_RANKS = 2
NUM_HOSTS = 2
"""Of as many ranks, for rows by host."""

REFUSALS = ("CompatError: ", "PlanError: ", "ConfigError: ", "InputError: ")
"""How an error of this package begins."""


def _run_features(rank: int, by_host: bool) -> dict[Key, list[Outcome]]:
    """Runs cells on this rank: TorchRec's, ours under SparseDist, ours interleaved."""
    found: dict[Key, list[Outcome]] = {}
    for feature in FEATURES:
        for kind in feature.kinds if feature.by_host == by_host else ():
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


Outcomes = Sequence[Outcome]


def words(feature: Feature, by_rank: Sequence[Outcomes]) -> dict[tuple[str, str], str]:
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


def _word(feature: Feature, phase: str, runs: Outcomes, stock: Outcomes, note: str) -> str:
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
    """Returns what a line of the summary says of a module, or of micro-batches."""
    if ": computed once per batch" in line or ": not pipelined" in line:
        return line.replace(", of its exchange only that of ids is hidden", "")
    _, found, why = line.partition("; no more than 1 because ")
    return f"1 micro-batch because {_first_sentence(why)}" if found else ""


def _first_sentence(text: str) -> str:
    for end in ("\n", "; ", ". "):
        text = text.split(end)[0]
    return " ".join(text.split()).rstrip(".")


def _compare(feature: Feature, phase: str, runs: Outcomes, stock: Outcomes) -> None:
    how = {"rtol": feature.rtol, "atol": feature.atol}
    given = "evaluated" if phase == "eval" else "trained"
    try:
        mine, its = ([list(getattr(one, given)) for one in outcomes] for outcomes in (runs, stock))
        torch.testing.assert_close(mine, its, **how)
        if phase == "train":
            left, expected = ([each.result for each in outcomes] for outcomes in (runs, stock))
            assert_same_results(left, expected, **how)
    except AssertionError as error:
        raise DiffersError(f"{feature.name}, {phase}: {error}") from error


@dataclass(frozen=True)
class Ran:
    """Result of an entry of the surface on a rank."""

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
    return _run_features(rank, by_host=False), _run_surface(rank)


def _run_by_host(rank: int, world_size: int) -> dict[Key, list[Outcome]]:
    pretend_hosts(rank, NUM_RANKS)
    return _run_features(rank, by_host=True)


def run_all() -> tuple[dict[Key, dict[tuple[str, str], str]], dict[str, tuple[str, str]]]:
    """Runs every cell and every entry of the surface and puts them into words."""
    features, surface = zip(*run_ranks(_run, NUM_RANKS, timeout_s=280))
    by_host = run_ranks(_run_by_host, NUM_HOSTS * NUM_RANKS, timeout_s=280)
    cells = {
        (feature.name, kind): words(feature, [found[feature.name, kind] for found in by_rank])
        for feature in FEATURES
        for kind in feature.kinds
        for by_rank in [by_host if feature.by_host else features]
    }
    entries = {
        entry.name: surface_words(entry, [found[entry.name] for found in surface])
        for entry in SURFACE
    }
    return cells, entries


if __name__ == "__main__":
    PAGE.write_text(page_of(*run_all()))
