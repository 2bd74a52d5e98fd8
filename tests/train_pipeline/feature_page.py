"""The text of ``docs/features.md``, from the words that ``feature_table.py`` finds for its runs."""

import re
from collections.abc import Iterable, Mapping, Sequence

from tests.proof.proved_models import table

KINDS = {"bags": "EmbeddingBagCollection", "sequences": "EmbeddingCollection"}
PIPELINES = ("SparseDist", "Interleaved")

Key = tuple[str, str]
"""Name of a feature and kind of collection."""
Texts = tuple[str, ...]
"""A cell's text in each column."""

HEAD = """\
# What works

This page says which features of TorchRec train with hot/cold tables. Runs on 2 CPU ranks, of 3
steps and an evaluation, beside stock TorchRec make it
(`python -m tests.train_pipeline.feature_table`).

- **works**: predictions, weights and optimizer state equal TorchRec's up to rounding;
  *(unsharded)*: an unsharded model's, since FBGEMM has no CPU kernel.
- **stock path**: equal, but computed once per batch.
- **refused**: a `CompatError`, while planning a `PlanError`, on all ranks.
- **fails**: TorchRec's own run on the CPU ends in the same error.
"""

FEATURES_HEAD = """\
## Collections

Of two results the first is `TrainPipelineSparseDist`'s, the second `InterleavedTrainPipeline`'s
with 3 micro-batches, or 1 where 3 are refused."""

SURFACE_HEAD = """\
## Other parts of TorchRec

Of two results the first is with TorchRec's tables, the second with hot/cold tables. *Planned*:
`hot_rows` of `hot_cold_planner` names the table; *placed*: a plan made by hand has its
`HotColdParams`. *Idle streams*: in place of a GPU's, streams that do nothing."""

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
    """What does not work in all columns, by result; what ends alike for one reason is one line."""
    names: dict[str, dict[str, list[str]]] = {}
    for name, texts in lines.items():
        if not _do_all_work(texts):
            result, reason = _result_and_reason(texts)
            names.setdefault(result, {}).setdefault(reason, []).append(name)
    parts = []
    for result, by_reason in names.items():
        bullets = "".join(_bullet(folded(of), reason) for reason, of in by_reason.items())
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
    for head, of_head in rests.items():
        if of_head == ["planned", "placed"] or of_head == [""]:
            words.append(head)
        elif len(of_head) == 1:
            words.append(f"{head}, {of_head[0]}")
        else:
            words.append(f"{head} ({'; '.join(rest or 'alone' for rest in of_head)})")
    return "; ".join(words)
