"""Explains why a model cannot be traced: the line of the model, and a remedy.

TorchRec's pipelines find the input of each table with torch.fx, which runs the forward of every
module that contains tables on proxies. A proxy cannot be a number, a condition or an iterable; such
a use ends in a Python error that names neither the tracer nor the model.
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
    """Translates errors of TorchRec's rewrite of a model, which runs in this context.

    Raises:
        CompatError: In place of any error that the model's forward raised while it was traced.
    """
    try:
        yield
    except Exception as error:  # any error of Python, torch.fx or the model
        frames = _traced_frames(error)
        if frames is None:
            raise
        model_frames = [frame for frame in frames if not _is_library(frame.filename)]
        # the innermost line outside the libraries is the one that the user can change
        raise CompatError(_told(error, model_frames[-1] if model_frames else None)) from error


def _traced_frames(error: Exception) -> list[traceback.FrameSummary] | None:
    """Lists the frames inside the tracer, innermost last; ``None`` = the error is not from it."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if _TRACER not in codes:
        return None
    return traceback.extract_tb(error.__traceback__)[codes.index(_TRACER) :]


def _is_library(filename: str) -> bool:
    """Whether a file belongs to Python, torch or TorchRec."""
    if filename.startswith(_STDLIB) and "site-packages" not in filename:
        return True
    return filename.startswith((*_LIBRARIES, "<"))  # "<" marks generated code


def _told(error: Exception, frame: traceback.FrameSummary | None) -> str:
    """Writes the message for an error at a line of the model."""
    where = "" if frame is None else f" at {frame.filename}:{frame.lineno}, `{frame.line}`"
    return (
        "the model cannot be traced by torch.fx, which tells the pipeline what its tables look "
        f"up: the tracer stopped{where} ({type(error).__name__}: {str(error).strip()}). Only "
        "modules with tables inside are traced. Either move that line into a function of its "
        "own at the top level of a file and mark it there with torch.fx.wrap, or move the dense "
        "part into an nn.Module of its own that holds no tables"
    )
