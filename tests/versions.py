"""Runs the suite with each TorchRec release that setup.py allows: ``make versions``.

``.venv-1.9`` and its like are kept for the next run: what requirements.txt pins, and the newest
torch, FBGEMM and TorchRec of the release. Where pip finds no CPU build of torch, it takes the CUDA
build: about 6 GB in place of 1.6. Arguments are pytest's. Each release has a line, with the reason
where it cannot be installed; the exit code is 1 if any failed.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.packaging import ROOT
from torchrec_picasso.compat import FBGEMM_OF_TORCH, SUPPORTED_TORCH

RELEASES = {str(FBGEMM_OF_TORCH[torch]): torch for torch in SUPPORTED_TORCH}
"""torch's minor release by TorchRec's, which is FBGEMM's."""

_VERSIONS = """
from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in ("torchrec", "torch", "fbgemm-gpu-cpu")), sep=", ")
"""


def requirements(release: str, torch: str) -> str:
    """requirements.txt with a release's torch and FBGEMM."""
    text = (ROOT / "requirements.txt").read_text()
    for name, minor in (("torch", torch), ("fbgemm-gpu-cpu", release)):
        text = re.sub(rf"^{name}==.*", f"{name}=={minor}.*", text, flags=re.MULTILINE)
    return text


def run(*argv: object) -> str:
    """Gives what a command said; raises RuntimeError with its last error if it fails."""
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"\w*error\b", line, re.IGNORECASE)]
        raise RuntimeError((errors or lines or [f"exit code {done.returncode}"])[-1])
    return done.stdout.strip()


def install(folder: Path, release: str, torch: str) -> str:
    """Makes or renews an environment and gives the versions in it; raises as :func:`run`."""
    python, wanted = folder / "bin" / "python", folder / "requirements.txt"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--upgrade")
    run(sys.executable, "-m", "venv", folder)
    wanted.write_text(requirements(release, torch))
    run(*pip, "-r", wanted)
    run(*pip, "--no-deps", f"torchrec=={release}.*", "-e", ROOT)
    return run(python, "-c", _VERSIONS)


def suite(folder: Path, pytest_argv: Sequence[str]) -> tuple[int, str]:
    """Runs the suite in an environment: its exit code, and its last line. ``suite.log`` has all."""
    argv = [folder / "bin" / "python", "-m", "pytest", "-q", *pytest_argv]
    with (folder / "suite.log").open("w+") as file:
        code = subprocess.run(argv, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
        file.seek(0)
        return code.returncode, file.read().strip().rpartition("\n")[2]


def main(pytest_argv: Sequence[str]) -> int:
    """Prints a line for each release, and gives the exit code."""
    codes = []
    for release, torch in RELEASES.items():
        folder = ROOT / f".venv-{release}"
        try:
            installed = install(folder, release, torch)
        except RuntimeError as error:
            installed, code, last = (
                f"torchrec {release}, torch {torch}",
                1,
                f"not installed: {error}",
            )
        else:
            code, last = suite(folder, pytest_argv)
            last += f"; see {folder.name}/suite.log" if code else ""
        print(f"{installed}: {last}", flush=True)
        codes.append(code)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
