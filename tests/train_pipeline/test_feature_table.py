"""``docs/features.md`` says what a run says, and nothing in it trains otherwise than TorchRec."""

import dataclasses
import re
from importlib.metadata import version

import pytest
import torch

from tests.sharding.jobs import Result
from tests.train_pipeline.feature_cells import Feature, Outcome
from tests.train_pipeline.feature_table import (
    PAGE,
    DiffersError,
    Ran,
    page_of,
    run_all,
    surface_words,
    words,
)
from tests.train_pipeline.surface import Entry
from torchrec_picasso.version import TESTED_TORCHREC

FEATURE = Feature("any")


def _without_upstream_errors(page: str) -> list[str]:
    """A page's lines with TorchRec's own errors taken off: each release and build has others."""
    is_error = re.compile(r"- (.+): \w+Error: .*").fullmatch
    lines = []
    for line in page.splitlines():
        lines += found[1].split("; ") if (found := is_error(line)) else [line]
    return sorted(lines)


def test_the_page_is_what_ran() -> None:
    is_pinned = version("torchrec") == TESTED_TORCHREC
    compared = str.splitlines if is_pinned else _without_upstream_errors
    assert compared(PAGE.read_text()) == compared(page_of(*run_all())), (
        "a cell ran otherwise; python -m tests.train_pipeline.feature_table writes the page"
    )


def _ran(value: float, summary: str = "tables: interleaved\n2 micro-batches") -> Outcome:
    weights = {"w": [((0,), torch.full((2,), value))]}
    return Outcome(Result([], weights, {}, {}, []), [torch.zeros(1)], [torch.zeros(1)], summary)


def test_what_trains_otherwise_gets_no_cell() -> None:
    assert set(words(FEATURE, [[_ran(1), _ran(1), _ran(1)]]).values()) == {"works"}
    for runs in ([_ran(2), _ran(1), _ran(1)], [_ran(1), _ran(1), _ran(2)]):
        with pytest.raises(DiffersError, match="any, train"):
            words(FEATURE, [runs])
    other = dataclasses.replace(_ran(1), evaluated=[torch.ones(1)])
    with pytest.raises(DiffersError, match="any, eval"):
        words(FEATURE, [[_ran(1), _ran(1), other]])
    with pytest.raises(DiffersError, match="TorchRec itself does not run it"):
        words(FEATURE, [[Outcome(error="ValueError: no"), _ran(1), _ran(1)]])


def test_an_error_has_a_name_or_is_torchrecs() -> None:
    unnamed = Outcome(error="KeyError: 'hot_cold'")
    with pytest.raises(DiffersError, match="an error without a name"):
        words(FEATURE, [[_ran(1), unnamed, unnamed]])
    refused = Outcome(error="CompatError: no")
    with pytest.raises(DiffersError, match="an error without a name"):  # on one rank alone
        words(FEATURE, [[_ran(1), refused, refused], [_ran(1), _ran(1), _ran(1)]])


ENTRY = Entry("any", lambda rank, is_ours: None)
IDLE = Entry("any", lambda rank, is_ours: None, on_idle_streams=True)
ALONE = Entry("any", lambda rank, is_ours: None, is_ours_alone=True)
ONE, TWO = Ran(given=torch.ones(1)), Ran(given=torch.ones(1) + 1)
NO, ERROR = Ran(error="PlanError: no; do that"), Ran(error="KeyError: x")


def test_what_runs_otherwise_gets_no_line_of_the_surface() -> None:
    for entry, runs in (
        (ENTRY, [ONE, TWO]),
        (ENTRY, [ONE, ERROR]),
        (ENTRY, [ERROR, ONE]),
        (IDLE, [ONE, ONE, ONE]),
        (IDLE, [ERROR, ONE, TWO]),
        (ALONE, [ERROR]),
        (ALONE, [ONE]),
    ):
        with pytest.raises(DiffersError):
            surface_words(entry, [runs, runs])
    with pytest.raises(DiffersError):  # on one rank alone
        surface_words(ENTRY, [[ONE, NO], [ONE, ONE]])
