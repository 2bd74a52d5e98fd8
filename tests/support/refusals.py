"""What a refused call says."""

from collections.abc import Callable
from typing import Any

import pytest


def refusal(kind: Any, act: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The words of the error that a call must raise."""
    with pytest.raises(kind) as caught:
        act(*args, **options)
    return str(caught.value)
