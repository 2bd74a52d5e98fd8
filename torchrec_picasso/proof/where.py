"""Finds the line of the user's model that is running."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import fbgemm_gpu
import mpmath
import numpy
import sympy
import tensordict
import torch
import torchrec
import typing_extensions

__all__ = ["current_line", "is_import", "is_users", "line_of"]

_OURS = str(Path(__file__).parents[1]) + os.sep
_ZOO = os.path.join(_OURS, "app", "zoo") + os.sep
"""Folder of models: user code for the proof, though inside this package."""

_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_ADDED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))

_LIBRARIES = (
    _OURS,
    str(typing_extensions.__file__),
    *(
        os.path.dirname(str(package.__file__)) + os.sep
        for package in (torch, torchrec, fbgemm_gpu, tensordict, numpy, sympy, mpmath)
    ),
)


@functools.lru_cache(4096)
def _is_users_file(name: str) -> bool:
    """Whether a file is the user's; installed packages that are not listed count as the user's."""
    if name.startswith(_ZOO):
        return True
    if name.startswith("<frozen"):
        return False
    if name.startswith(_LIBRARIES):
        return False
    return name.startswith(_ADDED) or not name.startswith(_STANDARD)


def is_users(code: CodeType) -> bool:
    """Whether code is the user's: not PyTorch's, TorchRec's, Python's or this package's engine."""
    return _is_users_file(code.co_filename)


def is_import(frame: FrameType) -> bool:
    """Whether a frame runs the import of a module, or is called by one."""
    found: FrameType | None = frame
    while found is not None and not found.f_code.co_filename.startswith("<frozen importlib"):
        found = found.f_back
    return found is not None


def line_of(frame: FrameType) -> str:
    """File and line of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def current_line() -> str:
    """File and line of the innermost running code of the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return "the model" if frame is None else line_of(frame)
