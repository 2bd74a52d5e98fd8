"""Why a model cannot be traced, with the line of the model and what to do about it.

TorchRec's pipelines find the input of each table by torch.fx, which runs the forward of every
module with tables inside on proxies. What a proxy cannot be (a number, a condition, something to
iterate over) ends in an error of Python's that names neither the tracer nor the model.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.fx
import torchrec

from torchrec_picasso.errors import CompatError

__all__ = ["explained_tracing"]

_TRACER = torch.fx.Tracer.trace.__code__
_LIBRARIES = tuple(str(Path(inspect.getfile(package)).parent) for package in (torch, torchrec))
_STDLIB = sysconfig.get_path("stdlib")


@contextmanager
def explained_tracing() -> Iterator[None]:
    """Around TorchRec's rewrite of a model.

    Raises:
        CompatError: In place of whatever the model's forward raised while it was traced.
    """
    try:
        yield
    except Exception as error:  # whatever Python, torch.fx or the model raises
        frames = _traced_frames(error)
        if frames is None:
            raise
        of_model = [frame for frame in frames if not _is_library(frame.filename)]
        raise CompatError(_told(error, of_model[-1] if of_model else None)) from error


def _traced_frames(error: Exception) -> list[traceback.FrameSummary] | None:
    """What ran inside the tracer, innermost last; ``None`` = the error came from elsewhere."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if _TRACER not in codes:
        return None
    return traceback.extract_tb(error.__traceback__)[codes.index(_TRACER) :]


def _is_library(filename: str) -> bool:
    if filename.startswith(_STDLIB) and "site-packages" not in filename:
        return True
    return filename.startswith((*_LIBRARIES, "<"))  # "<" = code that was generated


def _told(error: Exception, frame: traceback.FrameSummary | None) -> str:
    where = "" if frame is None else f" at {frame.filename}:{frame.lineno}, `{frame.line}`"
    return (
        "the model cannot be traced by torch.fx, which tells the pipeline what its tables look "
        f"up: the tracer stopped{where} ({type(error).__name__}: {str(error).strip()}). Only "
        "modules with tables inside are traced. Either move that line into a function of its "
        "own at the top level of a file and mark it there with torch.fx.wrap, or move the dense "
        "part into an nn.Module of its own that holds no tables"
    )
