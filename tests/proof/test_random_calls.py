"""What rules say of random calls is what these do with data; a wrong rule is found."""

from dataclasses import replace

import pytest

from tests.proof.random_calls import run_programs
from torchrec_picasso.proof.call import RULES, Call
from torchrec_picasso.proof.values import Kind, Value

NUM_PROGRAMS = 40


def test_rules_say_what_calls_do() -> None:
    num_calls, wrong = run_programs(range(NUM_PROGRAMS))
    assert wrong == []
    assert num_calls > 5 * NUM_PROGRAMS


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["sum"]

    def total(call: Call) -> Value | None:
        (found,) = right(call) or [None]
        return Value(Kind.MEAN) if found is not None and found.kind is Kind.SUM else found

    monkeypatch.setitem(RULES, "sum", replace(right, function=total))
    assert run_programs(range(NUM_PROGRAMS))[1]
