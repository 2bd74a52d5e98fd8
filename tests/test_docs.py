"""Names in the documents exist: files, tests, benchmarks' options; and the table of packages."""

import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.readme.blocks import blocks_of, commands_of, unknown_options
from tests.test_layers import ROWS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks" / "README.md",
]
FEWEST_DOCUMENTS, FEWEST_FILES, FEWEST_COMMANDS = 25, 150, 25
"""The walk must see at least these; a walk that sees nothing finds nothing."""

_FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\w\.(?:py|md|yaml|ipynb|svg|txt|json))`")
_FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(#[^)]*)?\)")


def named_files(text: str) -> list[str]:
    """Paths in backticks, files and folders."""
    return [*_FILE.findall(text), *_FOLDER.findall(text)]


def missing(paths: Iterable[str], beside: Path) -> list[str]:
    """Names that are neither in the checkout, nor in the package, nor beside the document."""
    roots = (ROOT, ROOT / "torchrec_picasso", beside)
    return [path for path in paths if not any((root / path).exists() for root in roots)]


def test_named_files_are_there() -> None:
    assert len(DOCUMENTS) >= FEWEST_DOCUMENTS
    seen = 0
    for document in DOCUMENTS:
        paths = named_files(document.read_text())
        seen += len(paths)
        assert not missing(paths, document.parent), document.name
    assert seen >= FEWEST_FILES


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        links = [path for path, _ in _LINK.findall(document.read_text())]
        assert all((document.parent / path).exists() for path in links), (document.name, links)


def test_pictures_are_well_formed() -> None:
    pictures = sorted((ROOT / "docs").glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert ElementTree.parse(picture).getroot().get("viewBox")


def test_a_file_that_is_not_there_is_found() -> None:
    paths = named_files("`rows/request.py`, `tests/test_docs.py`, `rows/cellar.py`, `cellar/`")
    assert missing(paths, ROOT) == ["rows/cellar.py", "cellar/"]


def test_the_table_of_packages_is_that_of_the_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("## Packages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \d[\w, ]* \| (.+?) \|", table, re.MULTILINE)
    names = [tuple(re.findall(r"`([\w/]+)`", row)) for each in rows for row in each.split(";")]
    assert tuple(names) == ROWS[:-1]  # the last is __main__


def test_the_architecture_begins_with_the_engine() -> None:
    """Sixteen files to read first, then the worked example."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    first, second, third = re.split(r"^## ", text, flags=re.MULTILINE)[1:4]
    assert len(re.findall(r"^\d+\. `[\w/]+\.py`: ", first, re.MULTILINE)) == 16
    assert second.startswith("A batch, worked out")
    assert third


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_options_of_benchmarks_exist() -> None:
    blocks = blocks_of((ROOT / "benchmarks" / "README.md").read_text())
    commands = [line.split() for block in blocks for line in commands_of(block)]
    assert len(commands) >= FEWEST_COMMANDS
    unknown = {tuple(words): unknown_options(words[2], words[3:]) for words in commands}
    assert not {words: options for words, options in unknown.items() if options}
