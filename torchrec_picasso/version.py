"""The package version and the TorchRec versions it was tried with."""

__version__ = "0.1.0"

TESTED_TORCHREC = "1.8.0"
"""The TorchRec release that the test-suite runs against; see README for the supported range."""
