"""Messages of refused calls and benchmarks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def refusal(kind: Any, act: Callable[..., Any], /, *args: Any, **options: Any) -> str:
    """The words of the error that a call must raise."""
    with pytest.raises(kind) as caught:
        act(*args, **options)
    return str(caught.value)


def refusal_of(
    main: Callable[[Any], int], argv: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """Returns what it says: one line, with exit code 2."""
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error
