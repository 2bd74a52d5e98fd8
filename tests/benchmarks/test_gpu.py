"""The check of one GPU: its arithmetic, its skips, and all of its code once on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import requirements
from benchmarks.gpu.__main__ import main, run_parts
from benchmarks.gpu.clock import count_syncs, elapsed_ms, sync_sites
from benchmarks.gpu.delays import RandomDelays, delayed_batches
from benchmarks.gpu.report import timings
from benchmarks.gpu.settings import GpuSettings, ModelSize
from benchmarks.gpu.streams import PipelineRuns, judge
from benchmarks.gpu.training_state import largest_difference
from benchmarks.gpu.uvm import kernels, placement_problems, replicas_are_in_hbm

TINY = ModelSize(batch_size=16, dim=4, max_rows=60, layers=(4,), hot_rows=20)
ON_CPU = GpuSettings(
    device="cpu",
    repeats=2,
    race_steps=4,
    micro_batches=(2,),
    rounds=2,
    block_steps=1,
    num_batches=3,
    races=TINY,
    timed=TINY,
    uvm=TINY,
)
EXACT = PipelineRuns(loss_difference=0.0, weight_difference=0.0, unequal_runs=0)
PLAIN = "stock, plain loop"


CUDA = torch.device("cuda")


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Stream and cycles of every delay, on a machine that has neither."""
    found: list[tuple[Any, int]] = []
    current = ["default"]

    @contextlib.contextmanager
    def stream(name: str) -> Any:
        current.append(name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.append((current[-1], cycles)))
    return found


def test_random_delays_hit_all_streams_and_change_no_result(sleeps: list[tuple[Any, int]]) -> None:
    ones = torch.ones(3)
    with RandomDelays(["copy", "dist"], seed=1):  # type: ignore[list-item]
        for _ in range(1000):
            total = ones + ones
    assert total.tolist() == [2.0, 2.0, 2.0]
    assert 5 < len(sleeps) < 60
    assert {stream for stream, _ in sleeps} == {"default", "copy", "dist"}
    assert all(cycles > 0 for _, cycles in sleeps)


def test_every_batch_comes_behind_a_delay_of_the_stream_that_copies(
    sleeps: list[tuple[Any, int]],
) -> None:
    with torch.cuda.stream("copy"):  # type: ignore[arg-type]
        assert list(delayed_batches([1, 2], ["dist"], seed=0)) == [1, 2]  # type: ignore[list-item]
    assert [stream for stream, _ in sleeps[::2]] == ["copy", "copy"]
    assert list(delayed_batches([3], [], seed=0)) == [3]  # type: ignore[list-item]
    assert len(sleeps) == 4


class _Warner:
    """A variant that syncs once a step and warns of something else, too."""

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)


def test_syncs_are_counted_per_step_and_the_mode_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    sites = count_syncs(_Warner(), 3, CUDA)  # type: ignore[arg-type]
    assert list(sites.values()) == [1.0]
    assert modes == ["warn", "default"]


def test_time_on_a_gpu_is_that_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def elapsed_time(self, end: Event) -> float:
            return 7.0

    tell: Callable[[str], Callable[[], None]] = lambda what: lambda: calls.append(what)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "synchronize", tell("synchronize"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert elapsed_ms(tell("work"), CUDA) == 7.0
    assert calls == ["synchronize", "record", "work", "record", "synchronize"]
    assert elapsed_ms(tell("work"), torch.device("cpu")) < 1000.0


def test_ratios_are_taken_round_by_round() -> None:
    found_times = timings({"stock": [1.0, 10.0, 2.0], "ours": [2.0, 20.0, 2.0]}, "stock")
    assert found_times["stock"].ratio == 1.0
    assert found_times["ours"].ratio == 2.0
    assert found_times["ours"].ratio_range == (1.0, 2.0)
    assert found_times["ours"].median_ms == 2.0
    assert (found_times["stock"].low_ms, found_times["stock"].high_ms) == (1.5, 6.0)


def test_only_warnings_of_syncs_are_counted_and_places_start_at_the_package() -> None:
    sync = "called a synchronizing CUDA operation (Triggered internally)"
    inside = "/usr/lib/torchrec_picasso/ops/row_order.py"
    caught = [(inside, 47, sync), (inside, 47, sync), ("/x/torch/a.py", 1, sync), ("b", 2, "else")]
    assert sync_sites(caught, num_steps=2) == {
        "torchrec_picasso/ops/row_order.py:47": 1.0,
        "torch/a.py:1": 0.5,
    }


def test_a_difference_is_relative_to_the_largest_weight_and_nan_is_far() -> None:
    expected = {"a": torch.tensor([4.0, 1.0]), "empty": torch.empty(0)}
    near = {**expected, "a": torch.tensor([4.0, 1.5])}
    assert largest_difference(near, expected) == 0.125
    assert largest_difference(expected, expected) == 0.0
    broken = {**expected, "a": torch.tensor([4.0, float("nan")])}
    assert largest_difference(broken, expected) == float("inf")
    with pytest.raises(KeyError, match="empty"):
        largest_difference({"a": expected["a"]}, expected)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"loss_difference": 1e-2}, "ours: losses differ by 1e-02"),
        ({"weight_difference": float("inf")}, "weights by inf"),
        ({"unequal_runs": 3}, "ours: 3 of 20 runs are not equal"),
    ],
)
def test_a_race_is_a_problem(changes: dict[str, float], problem: str) -> None:
    ours = dataclasses.replace(EXACT, **changes)
    (found,) = judge({PLAIN: EXACT, "ours": ours}, {}, {1: True}, repeats=20).problems
    assert problem in found


def test_a_pipeline_that_raises_is_a_problem_beside_those_that_ran() -> None:
    report = judge({PLAIN: EXACT}, {"ours": "InputError: row 99"}, {}, repeats=20)
    assert report.problems == ["ours raised InputError: row 99"]
    assert len(report.rows) == 1


def test_bits_prove_nothing_where_the_plain_loop_does_not_repeat_itself() -> None:
    unequal = dataclasses.replace(EXACT, unequal_runs=3)
    report = judge({PLAIN: unequal, "ours": unequal}, {}, {1: False}, repeats=20)
    assert not report.problems
    assert "bits prove nothing" in report.notes[0]


def test_bits_that_lookahead_changes_are_a_problem() -> None:
    (found,) = judge({PLAIN: EXACT, "ours": EXACT}, {}, {1: True, 2: False}, repeats=20).problems
    assert found == "K=2: lookahead on and off are not equal to the bit"


def test_uvm_compares_with_a_cache_of_as_many_rows_and_knows_where_replicas_are() -> None:
    on_gpu = kernels(TINY, num_rows=200, device=torch.device("cuda"))
    assert next(iter(on_gpu)) == "fused_uvm_caching"
    assert on_gpu["fused_uvm_caching"].load_factor == 0.1
    assert [kernel.hot_rows for kernel in on_gpu.values()][-2:] == [0, 20]
    replica_bytes = 20 * 4 * 4
    assert replicas_are_in_hbm([0, 1000, 1000 + replica_bytes], TINY)
    assert not replicas_are_in_hbm([0, 1000, 1000], TINY)
    assert placement_problems(CUDA, in_hbm=True) == []
    assert placement_problems(torch.device("cpu"), in_hbm=False) == []
    (problem,) = placement_problems(CUDA, in_hbm=False)
    assert "so they are in host memory" in problem


@pytest.mark.parametrize(
    ("has_cuda", "has_nccl", "expected"),
    [
        (False, True, "skipped: no CUDA device"),
        (True, False, "skipped: no NCCL in this build of PyTorch"),
        (True, True, "skipped: no CUDA kernels in this fbgemm_gpu"),
    ],
)
def test_what_is_missing_is_named_and_no_failure_unless_it_is_required(
    has_cuda: bool,
    has_nccl: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(requirements, "_has_cuda_kernel", lambda operator: False)
    assert main([]) == 0
    assert capsys.readouterr().out.startswith(expected)
    assert main(["--require"]) == 1


def test_the_parts_run_on_the_cpu_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    assert run_parts(ON_CPU, ["streams", "overhead"], str(out)) == 0
    document = json.loads(out.read_text())
    assert document["environment"]["torchrec-picasso"]
    found = document["parts"]["streams"]["facts"]["found"]
    assert {"interleaved K=2", "interleaved K=2, lookahead"} <= set(found)
    assert all(each["unequal_runs"] == 0 for each in found.values())
    assert found[PLAIN]["loss_difference"] == 0.0
    step_ms = document["parts"]["overhead"]["facts"]["step_ms"]
    assert list(step_ms) == ["table_wise", "hot_cold:0", "hot_cold:20", "interleaved:2:20"]
    assert all(len(ms) == 2 and min(ms) > 0 for ms in step_ms.values())
    assert "interleaved:2:20" in capsys.readouterr().out


def test_others_run_beside_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    broken = dataclasses.replace(ON_CPU, races=dataclasses.replace(TINY, dim=3))
    assert run_parts(broken, ["streams", "uvm"], str(out)) == 1
    parts = json.loads(out.read_text())["parts"]
    assert "embedding_dim" in parts["streams"]["problems"][0]
    assert "Traceback" in parts["streams"]["facts"]["traceback"]
    assert [row["variant"] for row in parts["uvm"]["rows"]][1:] == [
        *("hot_cold:0 fused_uvm", "hot_cold:20 fused_uvm")
    ]
    assert "PROBLEM: raised" in capsys.readouterr().out
