"""Hook of mkdocs: pages that lie outside ``docs/``, links to them, and docstring roles.

README.md and the other pages of :data:`OUTSIDE` are read where they are, not copied.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    **{f"notebooks/{p.name}": f"notebooks/{p.name}" for p in (ROOT / "notebooks").glob("*.ipynb")},
}
"""Path in the repository of each file of the site that is not in ``docs/``, by its path there."""

_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")
_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):<code>[.~]?([^<]+)</code>")


def source_of(page: str) -> str:
    """Path in the repository of a file of the site, both in POSIX form."""
    return OUTSIDE.get(page, f"docs/{page}")


def page_of(source: str) -> str:
    """Inverse of :func:`source_of`; a path that no page shows stays outside, as ``../LICENSE``."""
    by_source = {path: page for page, path in OUTSIDE.items()}
    return by_source.get(source, os.path.relpath(source, "docs"))


def with_site_links(markdown: str, page: str) -> str:
    """Rewrites relative links of the repository into links of the site."""
    folder = PurePosixPath(source_of(page)).parent

    def link(match: re.Match[str]) -> str:
        target = page_of(os.path.normpath(folder / match[2]))
        return match[1] + os.path.relpath(target, PurePosixPath(page).parent)

    return _LINK.sub(link, markdown)


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the files of :data:`OUTSIDE`."""
    from mkdocs.structure.files import File

    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrites links."""
    return with_site_links(markdown, page.file.src_uri)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Shows Sphinx roles of docstrings as code."""
    return _ROLE.sub(r"<code>\1</code>", html)
