"""One legend: every shape letter in a name, and in a file's own legend, means what the glossary
says."""

import ast
import re
from pathlib import Path

import torchrec_picasso

ROOT = Path(torchrec_picasso.__file__).parent
GLOSSARY = ROOT.parent / "docs" / "glossary.md"
ROOMS = ("ops", "exchange", "rows", "sharding", "storage", "batches", "schedule", "train_pipeline")
_SUFFIX = re.compile(r"[a-z0-9]_(?=[A-Z])([A-Z]+)\d?$|[a-z0-9]_([hmnt])D?\d?$")
_ROW = re.compile(r"^- ([A-Za-z]): (.+)$", re.MULTILINE)
_FEWEST_NAMES, _FEWEST_LEGENDS = 100, 8


def _legend() -> dict[str, str]:
    letters = GLOSSARY.read_text().split("## Letters")[1]
    return dict(_ROW.findall(letters))


def _names(tree: ast.AST) -> set[str]:
    """Every name that the file gives to something."""
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
    return {getattr(n, fields[type(n)]) for n in ast.walk(tree) if type(n) in fields}


def _files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py"))


def test_letters_of_names_are_in_the_legend() -> None:
    legend, seen = _legend(), set()
    unknown = []
    for path in _files():
        for name in _names(ast.parse(path.read_text())):
            match = _SUFFIX.search(name)
            if match is None or name.isupper():
                continue
            seen.add(name)
            letters = match.group(1) or match.group(2)
            unknown += [f"{path.name}: {name}" for letter in letters if letter not in legend]
    assert len(seen) >= _FEWEST_NAMES
    assert not unknown, "not in docs/glossary.md: " + ", ".join(unknown)


def test_a_files_own_legend_agrees() -> None:
    legend, num_legends, wrong = _legend(), 0, []
    for path in _files():
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        _, found, own = docstring.partition("Shape letters")
        if not found:
            continue
        num_legends += 1
        own = " ".join(own.split("\n\n")[0].partition(":")[2].split())
        for letter, word in re.findall(r"\b([A-Z]) \(?([a-z]+)", own):
            if word.rstrip("s") not in legend.get(letter, ""):
                wrong.append(f"{path.name}: {letter} {word}, not {legend.get(letter)}")
    assert num_legends >= _FEWEST_LEGENDS
    assert not wrong, "; ".join(wrong)


def test_no_letter_is_explained_twice() -> None:
    letters = [letter for letter, _ in _ROW.findall(GLOSSARY.read_text().split("## Letters")[1])]
    assert len(letters) == len(set(letters)) >= 20
