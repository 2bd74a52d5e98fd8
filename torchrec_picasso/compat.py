"""Checks whether the installed torch and FBGEMM load together, before either is imported.

FBGEMM's libraries are built against one minor release of torch and load with no other, but neither
package's metadata says so, and the error is a missing symbol. Pairs that are known to fail are
refused by name; for other pairs only a failing import is reported. The check reads two or three
entries of package metadata, which takes a few milliseconds.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from importlib import metadata

from torchrec_picasso.errors import VersionError

FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9", "2.15": None}
"""FBGEMM's minor release by torch's; ``None`` = not released when this was written."""

SUPPORTED_TORCH = ("2.13", "2.14")
"""Minor releases of torch that ``setup.py`` allows, with their FBGEMM and TorchRec."""

_FBGEMM_NAMES = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
_RELEASE = re.compile(r"(\d+\.\d+)(?:\.\d+)*(?:\.post\d+)?(?:\+.*)?")


def check_installed() -> None:
    """Raises VersionError if the installed torch and FBGEMM are known not to work together, or are
    an unknown pair and TorchRec cannot be imported."""
    versions = installed_versions()
    if "torch" not in versions or len(versions) < 2:
        return  # not installed as packages: if one is missing, Python's own error says so
    if (reason := why_not_together(versions)) is not None:
        raise VersionError(reason)
    torch_minor, fbgemm_minors = _minors(versions)
    wanted = FBGEMM_OF_TORCH.get(torch_minor or "")
    if wanted is not None and fbgemm_minors == {wanted}:
        return  # a pair of releases that is known to work
    try:
        importlib.import_module("torchrec")
    except Exception as error:
        # a missing TorchRec is not a version conflict
        if isinstance(error, ModuleNotFoundError) and error.name == "torchrec":
            raise
        raise VersionError(
            f"{_spelled(versions)} cannot be imported together ({type(error).__name__}: {error}). "
            f"{_advice(versions)}"
        ) from error


def installed_versions() -> dict[str, str]:
    """Reads the versions of torch and of every installed FBGEMM package, by name, torch first."""
    found = {}
    for name in ("torch", *_FBGEMM_NAMES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def why_not_together(versions: Mapping[str, str]) -> str | None:
    """Explains why installed versions are known not to work together, and what to install instead;
    ``None`` for pairs that work and for unknown releases, nightlies and builds."""
    torch_minor, fbgemm_minors = _minors(versions)
    if torch_minor not in FBGEMM_OF_TORCH or not fbgemm_minors:
        return None
    wanted = FBGEMM_OF_TORCH[torch_minor]
    known = set(FBGEMM_OF_TORCH.values()) - {None}
    # two FBGEMM packages write the same files, and the one that was installed last counts
    if any(minor not in known or minor == wanted for minor in fbgemm_minors):
        return None
    return f"{_spelled(versions)} cannot work together. {_advice(versions)}"


def _minors(versions: Mapping[str, str]) -> tuple[str | None, set[str | None]]:
    """Extracts ``"2.13"`` of torch and of each FBGEMM; ``None`` = not a plain release."""
    matches = {name: _RELEASE.fullmatch(version) for name, version in versions.items()}
    minors = {name: match[1] if match else None for name, match in matches.items()}
    return minors["torch"], {minor for name, minor in minors.items() if name != "torch"}


def _spelled(versions: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())


def _advice(versions: Mapping[str, str]) -> str:
    """Names the pair to install: one for the installed torch if there is one, else the newest."""
    torch_minor, _ = _minors(versions)
    torch = torch_minor if torch_minor in SUPPORTED_TORCH else SUPPORTED_TORCH[-1]
    pairs = ", ".join(f"FBGEMM {FBGEMM_OF_TORCH[t]} - torch {t}" for t in SUPPORTED_TORCH)
    fbgemm, _, _ = next(name for name in versions if name != "torch").partition("-nightly")
    if "cpu" in " ".join(versions):
        fbgemm = "fbgemm-gpu-cpu"
    return (
        f"FBGEMM loads with one minor release of torch only ({pairs}); install a pair that works: "
        f'pip install "torch=={torch}.*" "{fbgemm}=={FBGEMM_OF_TORCH[torch]}.*"'
    )
