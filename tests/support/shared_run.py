"""A run on ranks that several tests look at."""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks


def run_once(function: Callable[..., Any], world_size: int, *args: Hashable) -> list[Any]:
    """Returns what each rank gives in one run, whoever asks and how often; also its error."""
    found = _outcome(function, world_size, args)
    if isinstance(found, RankError):
        raise found
    return found


@cache
def _outcome(function: Callable[..., Any], world_size: int, args: Any) -> list[Any] | RankError:
    try:
        return run_ranks(function, world_size, *args, timeout_s=280)
    except RankError as error:  # remembered: the tests that share the run must not repeat it
        return error
