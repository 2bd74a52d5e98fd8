"""The errors a caller may catch; each says what was found, what was expected, what to do."""

from __future__ import annotations


class PicassoError(ValueError):
    """Something the caller gave cannot be used: an id, a weight, a file, a table name.

    The base of all errors of this package, and a ``ValueError``.
    """


class ConfigError(PicassoError):
    """A configuration or command-line value is wrong; lists every problem with its place."""


class PlanError(PicassoError):
    """A placement cannot be made: unknown table, too many hot rows, statistics of another model."""


class CompatError(PicassoError):
    """A TorchRec feature, optimizer or kernel that cannot be trained exactly, refused by name."""


class VersionError(CompatError, ImportError):
    """Installed packages cannot work together; raised while this package is imported."""


class PeerError(PicassoError, RuntimeError):
    """Another rank failed, with its message, or does not answer; this one was all right."""


class InputError(PicassoError):
    """A batch holds ids or weights that no table can serve; raised on every rank of the group."""
