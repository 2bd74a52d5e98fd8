"""The package version and the tested TorchRec version."""

__version__ = "0.1.0"

TESTED_TORCHREC = "1.8.0"
"""The TorchRec release of the test suite; README has the supported range."""
