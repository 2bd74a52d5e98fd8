"""Contents of setup.py and the requirements files, read without installing anything."""

from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]


def setup_settings() -> dict[str, Any]:
    """The arguments that setup.py gives to setuptools."""
    file = ROOT / "setup.py"
    with mock.patch("setuptools.setup") as setup:
        exec(compile(file.read_text(), str(file), "exec"), {"__file__": str(file)})
    return dict(setup.call_args.kwargs)


def pins(*files: str) -> dict[str, str]:
    """Pinned versions by package; of several for different Pythons, the last."""
    found = {}
    for file in files:
        for line in (ROOT / file).read_text().splitlines():
            name, is_pin, version = line.partition(";")[0].strip().partition("==")
            if is_pin and not name.startswith("#"):
                found[name] = version
    return found
