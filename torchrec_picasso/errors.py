"""Errors that a caller may catch; each message has the value, the expectation and a remedy."""

from __future__ import annotations


class PicassoError(ValueError):
    """A value from the caller cannot be used: an id, a weight, a file, a table name.

    The base of all errors of this package, and a ``ValueError``.
    """


class ConfigError(PicassoError):
    """A configuration or command-line value is invalid; lists every problem with its place."""


class PlanError(PicassoError):
    """A placement is impossible: unknown table, too many hot rows, statistics of another model."""


class CompatError(PicassoError):
    """A TorchRec feature, optimizer or kernel cannot be trained exactly, and is refused by name."""


class VersionError(CompatError, ImportError):
    """Installed packages cannot work together; raised while this package is imported."""


class PeerError(PicassoError, RuntimeError):
    """Another rank failed, with its message, or does not answer; this rank itself did not fail."""


class InputError(PicassoError):
    """A batch or file contains invalid ids, weights or lengths; batches raise on all ranks."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error of another package, for a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
