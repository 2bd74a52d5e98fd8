"""Whatever YAML holds, it runs nothing, swells to nothing and is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_picasso.app.config import load_config
from torchrec_picasso.errors import ConfigError

LAUGHS = "l0: &l0 [x]\n" + "".join(
    f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MERGED = "m0: &m0 {a: 1}\n" + "".join(
    f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, r":6: not valid YAML: more than 100,000 values with aliases written out"),
        (MERGED, r":6: not valid YAML: more than 100,000 values with aliases written out"),
        ("data: &a [*a]\n", r":1: not valid YAML: a value holds itself by an alias"),
        ("data: &a {<<: *a}\n", r":1: not valid YAML: a value holds itself by an alias"),
        ("steps: " + "[" * 20_000, r": not valid YAML: nested too deeply"),
        ("steps: !!int x\n", r": not valid YAML: a value is not of its type \(invalid literal"),
        ("steps: !!int ''\n", r": not valid YAML: a value is not of its type \(string index"),
        ("steps: !!bool maybe\n", r": not valid YAML: a value is not of its type"),
        ("steps: 2020-99-99\n", r": not valid YAML: a value is not of its type \(month must"),
        (f"steps: {'9' * 5000}\n", r": not valid YAML: a value is not of its type \(Exceeds"),
        ("? [a]\n: 3\n", r": not valid YAML: a value is not of its type \(unhashable"),
        (f"seed: 1{'0' * 400}\n", r"seed: expected a number of 64 bits at most, got one of 1329"),
        (f"{'k' * 1000}: 1\n", r"k{200}\.\.\.: unknown key; known keys: "),
        (f"data: {{kind: {'x' * 5000}}}\n", r"data\.kind: expected one of .*; got 'x{200}\.\.\.'"),
        (f"steps: [{'1, ' * 5000}]\n", r"steps: expected a whole number, got \[[1, ]{199}\.\.\. "),
    ],
)
def test_hostile_documents_are_refused_shortly(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yaml(: 1 problem\n  )?{problem}") as caught:
        load_config(tmp_path / "run.yaml")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "value",
    ["!!python/object/apply:os.system ['touch {}']", "!!python/name:os.system", "!own 3"],
)
def test_tags_run_nothing(tmp_path: Path, value: str) -> None:
    marker = tmp_path / "a_command_ran"
    (tmp_path / "run.yaml").write_text(f"steps: {value.format(marker)}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: not valid YAML: could not determine a co"):
        load_config(tmp_path / "run.yaml")
    assert not marker.exists()
