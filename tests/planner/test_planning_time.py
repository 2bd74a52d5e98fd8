"""Planning stays linear in the tables: what is expensive is counted, and a plan timed beside stock.

The figures of a machine are measured by ``python -m benchmarks.planning_time``.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator

from benchmarks.planning_time import Workload, main, plan_ours


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts proposals placed and options estimated."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str, what: Callable[..., int]) -> None:
        inner = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += what(*args, **kwargs)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(GreedyPerfPartitioner, "partition", lambda *args, **kwargs: 1)
    count(EmbeddingStorageEstimator, "estimate", lambda self, options, **kwargs: len(options))
    return counted


@pytest.mark.parametrize("hot_rows", [None, 500])
def test_expensive_calls_grow_with_the_tables_alone(
    calls: Counter[str], hot_rows: int | None
) -> None:
    found = []
    for num_tables in (15, 45):
        calls.clear()
        workload = Workload(num_tables=num_tables)
        plan_ours(workload, workload.stats(), hot_rows=hot_rows)
        assert calls["partition"] == 1
        assert calls["estimate"] <= 10 * num_tables
        found.append(dict(calls))
    assert found[1]["estimate"] <= 4 * found[0]["estimate"]


def test_the_benchmark_prints_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "time.json"
    assert main(["--tables", "3", "5", "--times", "1", "--json", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    planning = json.loads(out.read_text())["planning"]
    assert [line["num_tables"] for line in planning] == [3, 5]
    assert all(line[name] > 0 for line in planning for name in line)
