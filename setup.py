"""Packaging of torchrec_picasso; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION: dict[str, str] = {}
exec((ROOT / "torchrec_picasso" / "version.py").read_text(), VERSION)

setup(
    name="torchrec_picasso",
    version=VERSION["__version__"],
    description="Hot/cold embedding rows and packed exchanges for TorchRec, exact and measured",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["torchrec_picasso", "torchrec_picasso.*"]),
    package_data={"torchrec_picasso": ["py.typed"]},
    python_requires=">=3.10",
    # An FBGEMM loads with one minor release of torch: 1.8 with 2.13, 1.9 with 2.14. No metadata
    # says so, so these bounds make the newest of each a pair; torchrec_picasso/compat.py refuses
    # what else an installer may put together. On a machine without CUDA see requirements.txt.
    install_requires=[
        "torch>=2.13,<2.15",
        "torchrec>=1.8,<1.10",
        "fbgemm-gpu>=1.8,<1.10",
        "numpy",
        "pandas",
        "pyarrow",
    ],
    extras_require={
        "app": ["pyyaml", "tqdm", "matplotlib", "tensorboard"],  # the command line
        "tensorboard": ["tensorboard"],
        "notebook": ["torchrec_picasso[app]", "jupyterlab", "ipykernel", "nbclient"],
        "docs": ["mkdocs", "mkdocs-material", "mkdocstrings[python]"],
        "test": [
            "torchrec_picasso[app]",
            "ipykernel",
            "nbclient",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
        ],
    },
    entry_points={"console_scripts": ["torchrec-picasso = torchrec_picasso.app.cli.main:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
