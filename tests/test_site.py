"""The site of the documents, without building it: pages, links, API names, and their length."""

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

import torchrec_picasso

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
_SPEC = importlib.util.spec_from_file_location("site_hook", ROOT / "docs" / "dev" / "site.py")
assert _SPEC is not None
assert _SPEC.loader is not None
HOOK = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(HOOK)

LOG = "dev/log.md"
MOST_WORDS = 10_000
"""Of ``docs/`` without the log, as ``wc -w`` counts: what blanks separate, so also code, and the
bars and numbers of tables."""
MOST_WORDS_OF_A_PAGE = 1_100
"""Words with a letter outside code blocks, of any page but the log."""
MOST_WORDS_OF_A_RECORD, MOST_LINES_OF_A_RECORD = 180, 20
FEWEST_PAGES, FEWEST_LINKS, FEWEST_RECORDS = 25, 80, 10
"""The walk must see at least these; a walk that sees nothing finds nothing."""

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _entries(nav: Any) -> Iterator[str]:
    """Pages of the navigation, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _entries(entry)


def _source(page: str) -> Path:
    return ROOT / HOOK.source_of(page)


PAGES = [*_entries(CONFIG["nav"])]


def _prose(page: str) -> str:
    return _FENCE.sub("", _source(page).read_text())


def _anchors(page: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = [re.sub(r"[^\w\s-]", "", title.lower()) for title in _HEADING.findall(_prose(page))]
    return {re.sub(r"[-\s]+", "-", title.strip()) for title in titles}


def _num_words(text: str) -> int:
    """Words with a letter; bars and numbers of tables are none."""
    return sum(any(c.isalpha() for c in word) for word in text.split())


def test_every_page_is_in_the_navigation_once() -> None:
    folder = ROOT / "docs"
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    outside = {page for page in HOOK.OUTSIDE if page.endswith(".md")}
    assert len(PAGES) == len(set(PAGES)) >= FEWEST_PAGES
    assert set(PAGES) == pages | outside
    assert not pages & outside
    assert all(_source(page).is_file() for page in PAGES)


def test_links_between_pages_resolve() -> None:
    """Links of the site: to pages with their anchors, to notebooks and pictures."""
    seen = 0
    for page in PAGES:
        for target, anchor in _LINK.findall(HOOK.with_site_links(_prose(page), page)):
            linked = os.path.normpath(PurePosixPath(page).parent / target) if target else page
            seen += 1
            assert _source(linked).is_file(), f"{page}: {target}"
            assert linked in PAGES or not linked.endswith(".md"), f"{page}: {target} is no page"
            assert not anchor or anchor in _anchors(linked), f"{page}: {target}#{anchor}"
    assert seen >= FEWEST_LINKS


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "docs/usage.md", "usage.md"),
        ("benchmarks.md", "../docs/decisions/planner.md#x", "decisions/planner.md#x"),
        ("decisions/planner.md", "../../README.md", "../index.md"),
        ("usage.md", "../notebooks/01_skew.ipynb", "notebooks/01_skew.ipynb"),
        ("usage.md", "https://arxiv.org", "https://arxiv.org"),
        ("usage.md", "../LICENSE", "../LICENSE"),
    ],
)
def test_links_of_the_repository_become_the_sites(page: str, link: str, expected: str) -> None:
    assert HOOK.with_site_links(f"[a]({link})", page) == f"[a]({expected})"


def test_the_api_page_has_the_public_names() -> None:
    names = re.findall(r"^::: (\S+)$", _source("api.md").read_text(), re.MULTILINE)
    public = {f"torchrec_picasso.{name}" for name in torchrec_picasso.__all__}
    assert len(names) == len(set(names))
    assert set(names) == public - {"torchrec_picasso.__version__"}
    assert all(hasattr(torchrec_picasso, name.partition(".")[2]) for name in names)


def test_nothing_is_loaded_from_elsewhere() -> None:
    """No fonts and scripts; a diagram's script comes from a server, so there are pictures."""
    assert CONFIG["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript", "repo_url"} & set(CONFIG)
    for page in PAGES:
        text = _source(page).read_text()
        assert "```mermaid" not in text, page
        assert not re.search(r"!\[[^]]*\]\(http|<script|<img|<link", _FENCE.sub("", text)), page


def test_pages_are_short() -> None:
    num_words = {page: _num_words(_prose(page)) for page in PAGES if page != LOG}
    assert not {page: n for page, n in num_words.items() if n > MOST_WORDS_OF_A_PAGE}


def test_the_documents_are_short() -> None:
    in_docs = set(PAGES) - {LOG, *HOOK.OUTSIDE}
    num_words = {page: len(_source(page).read_text().split()) for page in in_docs}
    assert len(num_words) >= FEWEST_PAGES
    assert sum(num_words.values()) <= MOST_WORDS, num_words


def test_records_of_decisions_are_short_and_have_a_status() -> None:
    records = [page for page in PAGES if page.startswith("decisions/")]
    assert len(records) >= FEWEST_RECORDS
    index = _source("decisions.md").read_text()
    for page in records:
        text = _source(page).read_text()
        assert len(text.splitlines()) <= MOST_LINES_OF_A_RECORD, page
        assert _num_words(text) <= MOST_WORDS_OF_A_RECORD, page
        assert re.match(r"# .+\n\n(Accepted|Superseded), \d{4}-\d\d-\d\d", text), page
        assert all(f"**{part}.**" in text for part in ("Context", "Decision", "Consequence")), page
        assert f"]({page})" in index, page
