"""The wheel holds the package: it builds without a network, and works far from the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packaging import ROOT

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
SOURCES = ("torchrec_picasso", "setup.py", "pyproject.toml", "README.md", "LICENSE")
LOADS = """
import itertools, pathlib, sys
import torchrec_picasso
assert pathlib.Path(torchrec_picasso.__file__).is_relative_to(sys.argv[1])
assert all(getattr(torchrec_picasso, name) for name in torchrec_picasso.__all__)
from torchrec_picasso.app.cli.arguments import make_parser
from torchrec_picasso.app.cli.demo import demo_spec
from torchrec_picasso.app.zoo.registry import make_source
config = demo_spec(make_parser("").parse_args(["demo", "--batch-size", "8"])).config
next(iter(make_source(config.data, 0).batches(0, 2)))
from torchrec_picasso.app.config import load_config
try:
    load_config("configs/dlrm_criteo.yaml")
except torchrec_picasso.ConfigError as error:
    assert "those in configs/ of the source repository" in str(error)
else:
    raise AssertionError("configurations are not in the wheel")
"""
"""Every public name; what the demo reads, which is no file; where configurations are."""
LIBRARY_ALONE = """
import sys
sys.modules |= dict.fromkeys(["matplotlib", "tensorboard", "tqdm", "yaml"])
import torchrec_picasso
names = {*torchrec_picasso.__all__} - {"TensorBoardReports"}
assert all(getattr(torchrec_picasso, name) for name in names)
"""
"""Without the packages that only the command line needs."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, installed beside the packages of this Python."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, so that a build folder of the checkout plays no part
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    _run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    _run(*PIP, "install", "--no-deps", "--target", str(folder / "target"), str(wheel))
    return folder / "target"


def _run(*command: str, target: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if target is not None:
        environment["PYTHONPATH"] = str(target)
    done = subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (0, 2), done.stderr
    return done


def test_it_holds_every_file_of_the_package(target: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (root / "torchrec_picasso").rglob("*")
        return {str(p.relative_to(root)) for p in found if p.suffix in (".py", ".typed")}

    assert files(target) == files(ROOT)


def test_it_works_from_its_folder(target: Path) -> None:
    assert _run(sys.executable, "-c", LOADS, str(target), target=target).returncode == 0
    assert _run(sys.executable, "-c", LIBRARY_ALONE, target=target).returncode == 0
    program = str(target / "bin" / "torchrec-picasso")
    assert "usage: torchrec-picasso" in _run(program, "--help", target=target).stdout
