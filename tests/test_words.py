"""Names, docstrings and comments use the field's words, as far as a program can tell.

No file holds both versions of a place that a merge could not join.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrec_picasso

PACKAGE = Path(torchrec_picasso.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in (PACKAGE, ROOT / "benchmarks", ROOT / "examples", ROOT / "tests")
    for path in folder.rglob("*.py")
    if path != Path(__file__)  # which holds the words
)
ODD_WORDS = re.compile(
    r"\b(anew|likewise|plainest|in vain|by lot|to and fro|thereof|wherefrom|whereat)\b", re.I
)
PRONOUNS = {
    *("They", "It", "Its", "Their", "Those", "These", "Whose", "What", "Which", "Who", "As"),
    *("Likewise", "Ditto", "That", "Ours"),
}
ARGUMENT = re.compile(r"^ +\*{0,2}(\w+): (\w+)")
COMMENTED = {"ops": 4, "rows": 4, "exchange": 4, "batches": 4}
"""Fewest comments per 100 lines of code, by package."""
CONFLICT = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
FEWEST_TRACKED = 500
"""The search must see at least these files; one that sees nothing finds nothing."""


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that a file defines: variables, parameters, functions, classes, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def docstrings(tree: ast.AST) -> Iterator[str]:
    """The docstrings of a file's module, classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""


def comments(text: str) -> list[str]:
    """The comments of a file, but for those that speak to tools."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [comment for comment in found if not re.match(r"# (type|noqa|pragma)", comment)]


def num_code_lines(text: str) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    is_start = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and is_start:
            continue
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
        is_start = token.type in skipped
    return len(lines)


def odd_words(text: str) -> list[str]:
    """What a file says in words that are not the field's."""
    tree = ast.parse(text)
    found = [name for name in names(tree) if re.match(r"_?of(_|$)", name)]
    said = [*docstrings(tree), *comments(text)]
    found += [odd[0] for words in said for odd in ODD_WORDS.finditer(words)]
    starts = [words.split(maxsplit=1)[:1] for words in docstrings(tree)]
    found += [word for start in starts for word in start if word in PRONOUNS]
    entries = [ARGUMENT.match(line) for words in docstrings(tree) for line in words.splitlines()]
    return found + [entry[0] for entry in entries if entry is not None and entry[2] in PRONOUNS]


def test_words_are_the_fields() -> None:
    found = {str(path): odd_words(path.read_text()) for path in FILES}
    assert not {path: words for path, words in found.items() if words}


@pytest.mark.parametrize(("package", "fewest"), COMMENTED.items())
def test_steps_are_commented(package: str, fewest: int) -> None:
    texts = [path.read_text() for path in (PACKAGE / package).rglob("*.py")]
    num_comments = sum(len(comments(text)) for text in texts)
    assert 100 * num_comments >= fewest * sum(map(num_code_lines, texts))


def test_what_is_odd_is_found() -> None:
    text = 'def f(of_table):\n    """Does it anew.\n\n    Args:\n        of_table: They.\n    """\n'
    assert odd_words(text) == ["of_table", "anew", "        of_table: They"]
    assert odd_words('"""What it does."""') == ["What"]
    assert comments("x = 1  # why\n# noqa: E\n") == ["# why"]
    assert num_code_lines('"""Doc."""\n\nx = (\n    1,\n)\n# c\n') == 3


def test_no_merge_is_half_done() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so it is not known which files are tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    tracked = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert len(tracked) >= FEWEST_TRACKED
    marks = {path: CONFLICT.findall(path.read_bytes()) for path in tracked if path.is_file()}
    assert not {path: found for path, found in marks.items() if found}


def test_conflict_markers_are_found() -> None:
    sides = b"a\n" + b"<" * 7 + b" ours\n" + b"=" * 7 + b"\nb\n" + b">" * 7 + b" theirs\n"
    assert CONFLICT.findall(sides) == [b"<" * 7, b">" * 7]
    assert not CONFLICT.search(b"=======\n>>> print()\n>>>>>>>>>> \n <<<<<<< \n")
