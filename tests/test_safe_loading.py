"""Files of others run no code: YAML is loaded safely, and nothing is unpickled from a path.

Read from the source itself. Pickles that this package sends between its own processes are named.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrec_picasso

ROOT = Path(torchrec_picasso.__file__).parent
FEWEST_FILES = 150

BETWEEN_OWN_PROCESSES = {
    "app/launch/run_ranks.py": "what ranks of this run answer through pipes",
    "app/launch/rank_process.py": "what the launcher of this run sends",
    "batches/feed.py": "an empty batch that another rank of this run sends",
}
"""Files that may call ``pickle.loads``, and where the bytes come from."""

SAFE_YAML = {"app/config/safe_yaml.py"}
UNSAFE_YAML = {"load", "load_all", "full_load", "unsafe_load", "Loader", "FullLoader"}
UNSAFE_YAML |= {"UnsafeLoader", "full_load_all", "unsafe_load_all"}
PICKLE_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "_pickle"}
TORCH_LOADS = {"torch.load", "torch.serialization.load", "torch.hub.load"}
READS_PICKLES = {"load", "loads", "Unpickler", "open"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call as dotted text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def problems(path: str, source: str) -> list[str]:
    """Returns what a file does that it may not."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            *PICKLE_MODULES,
            "yaml",
        ):
            found.append(f"{path}: from {node.module} import: call it by the module's name")
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml":
            if node.attr in UNSAFE_YAML:
                found.append(f"{path}: yaml.{node.attr}")
            if node.attr == "SafeLoader" and path not in SAFE_YAML:
                found.append(f"{path}: yaml.SafeLoader: use config.safe_yaml.read_yaml")
        if isinstance(node, ast.Name) and node.id in ("eval", "exec"):
            found.append(f"{path}: {node.id}")
    for name, call in calls(tree):
        module, _, function = name.rpartition(".")
        keywords = {each.arg: ast.unparse(each.value) for each in call.keywords}
        is_own = function == "loads" and path in BETWEEN_OWN_PROCESSES
        if module in PICKLE_MODULES and function in READS_PICKLES and not is_own:
            found.append(f"{path}: {name}")
        if name in TORCH_LOADS and keywords.get("weights_only") != "True":
            found.append(f"{path}: {name} without weights_only=True")
        if keywords.get("allow_pickle", "False") != "False":
            found.append(f"{path}: {name} with allow_pickle")
        if function in ("read_pickle", "load_module"):
            found.append(f"{path}: {name}")
    return found


def test_no_file_runs_what_it_reads() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) >= FEWEST_FILES
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    assert [what for path, source in sources.items() for what in problems(path, source)] == []
    for path in BETWEEN_OWN_PROCESSES:
        assert "pickle.loads(" in sources[path], f"{path} unpickles nothing any more"


@pytest.mark.parametrize(
    "line",
    [
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import safe_load",
        "from pickle import loads",
        "pickle.loads(content)",
        "pickle.load(file)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "eval(text)",
    ],
)
def test_what_would_is_found(line: str) -> None:
    assert problems("app/runs/train.py", line)


def test_what_may_is_not() -> None:
    assert not problems("app/runs/train.py", "torch.load(path, weights_only=True)")
    assert not problems("app/runs/train.py", "np.load(path, allow_pickle=False)")
    assert not problems("app/launch/run_ranks.py", "pickle.loads(content)")
    assert not problems("app/config/safe_yaml.py", "class L(yaml.SafeLoader): pass")
