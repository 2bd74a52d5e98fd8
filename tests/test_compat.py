"""Versions that cannot work together are named before torch is imported; unknown ones may try."""

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests import versions as releases
from tests.support.packaging import pins, setup_settings
from tests.support.processes import run_python
from torchrec_picasso.compat import (
    FBGEMM_OF_TORCH,
    SUPPORTED_TORCH,
    check_installed,
    installed_versions,
    why_not_together,
)
from torchrec_picasso.errors import CompatError, PicassoError, VersionError

PAIRS = "(FBGEMM 1.8 - torch 2.13, FBGEMM 1.9 - torch 2.14)"
LATER_THAN_ANY = [f"2.{minor}.0" for minor in range(60)] + [f"1.{minor}.0" for minor in range(60)]


@pytest.mark.parametrize(
    ("torch", "fbgemm", "advised"),
    [
        ("2.15.0", "1.9.0", ("2.14", "1.9")),  # what pip made of unbounded ranges
        ("2.15.0+cu130", "1.8.0", ("2.14", "1.9")),
        ("2.14.1", "1.8.0", ("2.14", "1.9")),
        ("2.13.0+cpu", "1.9.0.post1", ("2.13", "1.8")),
        ("2.12.1", "1.8", ("2.14", "1.9")),
    ],
)
@pytest.mark.parametrize("name", ["fbgemm-gpu", "fbgemm-gpu-cpu"])
def test_pairs_known_to_fail_are_refused(
    name: str, torch: str, fbgemm: str, advised: tuple[str, str]
) -> None:
    assert why_not_together({"torch": torch, name: fbgemm}) == (
        f"torch {torch} and {name} {fbgemm} cannot work together. FBGEMM loads with one minor "
        f"release of torch only {PAIRS}; install a pair that works: "
        f'pip install "torch=={advised[0]}.*" "{name}=={advised[1]}.*"'
    )


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0"},
        {"torch": "2.14.1", "fbgemm-gpu": "1.9.0"},
        {"torch": "2.12.1", "fbgemm-gpu": "1.7.0"},
        {"torch": "2.16.0", "fbgemm-gpu": "1.10.0"},  # newer than this package
        {"torch": "2.15.0", "fbgemm-gpu": "1.10.0"},
        {"torch": "2.16.0", "fbgemm-gpu": "1.9.0"},
        {"torch": "2.14.0.dev20261101", "fbgemm-gpu-nightly": "2026.11.1"},
        {"torch": "2.14.0a0+git1234567", "fbgemm-gpu": "1.8.0"},
        {"torch": "2.14.0", "fbgemm-gpu": "1.8.0rc1"},
        {"torch": "2.13.0", "fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": "1.8.0"},  # either may count
        {"torch": "nonsense", "fbgemm-gpu": ""},
        {"torch": "2.15.0"},
    ],
)
def test_pairs_that_work_or_are_not_known_may_try(versions: Mapping[str, str]) -> None:
    assert why_not_together(versions) is None


def test_the_installed_pair_is_found_quickly_and_passes() -> None:
    start_s = time.perf_counter()
    versions = installed_versions()
    check_installed()
    assert time.perf_counter() - start_s < 0.5  # some ms; machines that test are slow now and then
    assert "torch" in versions
    assert len(versions) >= 2


def test_it_can_be_caught_as_what_it_is() -> None:
    for kind in (ImportError, CompatError, PicassoError, ValueError):
        assert issubclass(VersionError, kind)


def imported(folder: Path, versions: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Imports this package where other versions seem to be installed."""
    for name, version in versions.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return run_python("-c", "import torchrec_picasso", before=folder)


def test_a_known_bad_pair_ends_the_import_before_torch_is_touched(tmp_path: Path) -> None:
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported too early')")
    versions = {"torch": "2.15.0", "fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": "1.9.0"}
    done = imported(tmp_path, versions)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "torchrec_picasso.errors.VersionError: torch 2.15.0 and fbgemm-gpu 1.9.0 and "
        "fbgemm-gpu-cpu 1.9.0 cannot work together. "
    )
    assert '"torch==2.14.*" "fbgemm-gpu-cpu==1.9.*"' in last


def test_an_unknown_pair_that_does_not_load_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torchrec.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    done = imported(tmp_path, {"torch": "2.99.0", "fbgemm-gpu": "1.99.0"})
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "torch 2.99.0 and fbgemm-gpu 1.99.0" in last
    assert "cannot be imported together (OSError: undefined symbol: _ZN3c10). FBGEMM loads" in last
    assert "The above exception was the direct cause" in done.stderr


def test_an_unknown_pair_that_loads_is_used(tmp_path: Path) -> None:
    done = imported(tmp_path, {"torch": "2.99.0", "fbgemm-gpu": "1.99.0"})
    assert done.returncode == 0, done.stderr


def test_a_missing_torchrec_is_pythons_own_error(tmp_path: Path) -> None:
    (tmp_path / "torchrec.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torchrec'\", name='torchrec')"
    )
    done = imported(tmp_path, {"torch": "2.99.0", "fbgemm-gpu": "1.99.0"})
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torchrec'"


def ranges() -> dict[str, SpecifierSet]:
    """``install_requires`` of setup.py."""
    found = [Requirement(text) for text in setup_settings()["install_requires"]]
    return {requirement.name: requirement.specifier for requirement in found}


def allowed(specifier: SpecifierSet) -> list[str]:
    """Minor releases that a range allows, ascending."""
    fit = [version.removesuffix(".0") for version in LATER_THAN_ANY if version in specifier]
    return sorted(fit, key=lambda minor: tuple(map(int, minor.split("."))))


def test_the_newest_of_every_range_work_together() -> None:
    found = ranges()
    assert allowed(found["torch"]) == list(SUPPORTED_TORCH)
    fbgemm = [FBGEMM_OF_TORCH[torch] for torch in SUPPORTED_TORCH]
    assert allowed(found["fbgemm-gpu"]) == fbgemm
    assert allowed(found["torchrec"]) == fbgemm


def test_the_pinned_versions_are_a_supported_pair() -> None:
    pinned, found = pins("requirements.txt", "requirements-nodeps.txt"), ranges()
    assert pinned["torch"] in found["torch"]
    assert pinned["torchrec"] in found["torchrec"]
    assert pinned["fbgemm-gpu-cpu"] in found["fbgemm-gpu"]
    versions = {name: pinned[name] for name in ("torch", "fbgemm-gpu-cpu")}
    assert why_not_together(versions) is None


def test_a_release_changes_the_pins_of_torch_and_fbgemm_alone() -> None:
    pinned = [text for text in releases.requirements("1.8", "2.13").splitlines() if "*" in text]
    assert pinned == ["torch==2.13.*", "fbgemm-gpu-cpu==1.8.*"]
    assert len(releases.RELEASES) == len(SUPPORTED_TORCH)


def test_each_release_prints_a_line_also_after_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(folder: Path, release: str, torch: str) -> str:
        if release == "1.8":
            releases.run(sys.executable, "-c", "raise SystemExit('ERROR: no torch==2.13.*\\n')")
        folder.joinpath("bin").mkdir(parents=True)
        (python := folder / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return f"torchrec {release}.2"

    monkeypatch.setattr(releases, "ROOT", tmp_path)
    monkeypatch.setattr(releases, "install", install)
    for text, last in ("def test(): pass", "1 passed"), ("def test(): assert 0", "1 failed"):
        (tmp_path / "test_one.py").write_text(text)
        assert releases.main(["-p", "no:cacheprovider", "test_one.py"]) == 1
        first, second = capsys.readouterr().out.splitlines()
        assert first == "torchrec 1.8, torch 2.13: not installed: ERROR: no torch==2.13.*"
        assert second.startswith(f"torchrec 1.9.2: {last}")
        assert second.endswith("see .venv-1.9/suite.log") == ("failed" in last)
        shutil.rmtree(tmp_path / ".venv-1.9")
