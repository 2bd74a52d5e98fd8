"""Curves: fitted lines, measured on a real group, kept in a file, used at another world size."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hosts import pretend_hosts
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.curves import COLLECTIVES, LEVELS, Curve
from torchrec_picasso.cost.local import DenseTimes
from torchrec_picasso.errors import PicassoError, PlanError

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]


@given(latency=st.floats(0.01, 10), gbytes_per_s=st.floats(0.01, 100))
def test_a_line_is_found_again(latency: float, gbytes_per_s: float) -> None:
    curve = Curve.fit(SIZES, [latency + n / gbytes_per_s * 1e-6 for n in SIZES])
    assert curve.latency_ms == pytest.approx(latency, rel=1e-6)
    assert curve.gbytes_per_s == pytest.approx(gbytes_per_s, rel=1e-6)


def test_times_go_through_the_points_and_on_along_the_last_two() -> None:
    curve = Curve.fit([100, 200, 400], [1.0, 3.0, 4.0])
    assert [curve.ms_at(n) for n in (0, 100, 150, 200, 400)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert curve.ms_at(800) == pytest.approx(4.0 + 400 * (1.0 / 200))
    assert Curve.fit([100], [2.0]).latency_ms == 0.0  # one point tells no latency


@pytest.mark.parametrize("ms", [(0.2, 1.0, 1.1), (0.2, 1.0, 0.5), (33.9, 27.6, 29.7)])
def test_points_that_do_not_rise_go_on_in_proportion(ms: tuple[float, ...]) -> None:
    """Noise among sizes too small to show the bandwidth must not make large ones free."""
    curve = Curve.fit([100, 200, 400], ms)
    assert curve.ms_at(4000) == pytest.approx(10 * ms[-1])


@pytest.mark.parametrize(
    ("ms", "disturbed"),
    [
        ((1.9, 9.0, 43.7, 170.0, 711.2), []),  # emulated links: 2 hosts x 4 ranks, 100 Mbit/s
        ((1.9, 9.0, 43.7, 286.3, 711.2), [3]),
        ((2.7, 1.9, 9.0, 43.7, 170.0), [0]),
        ((1.31, 1.27, 0.14, 0.75, 3.99, 17.4), [0, 1]),
        ((0.2, 0.2, 1.8, 9.8, 42.8), []),  # a burst, then the link's rate
        ((0.3, 0.3, 0.5, 0.9, 9.1), [4]),
        ((5.0,), []),
    ],
)
def test_disturbed_points(ms: tuple[float, ...], disturbed: list[int]) -> None:
    sizes = [14336 * 4**i for i in range(len(ms))]
    curve = Curve.fit(sizes, ms)
    assert [index for index in range(len(ms)) if curve.is_disturbed(index)] == disturbed


@given(ms=st.lists(st.floats(0.001, 1e3), min_size=1, max_size=8))
def test_no_coefficient_is_negative(ms: list[float]) -> None:
    curve = Curve.fit([1000 * 4**i for i in range(len(ms))], ms)
    assert curve.latency_ms >= 0
    assert curve.ms_per_byte >= 0
    assert math.isfinite(curve.ms_at(1e9))
    assert curve.ms_at(1e9) >= 0


@pytest.mark.parametrize(
    ("sizes", "ms"), [([], []), ([1, 2], [1.0]), ([2, 1], [1.0, 2.0]), ([1, 2], [1.0, 0.0])]
)
def test_points_that_are_no_curve_are_refused(sizes: list[int], ms: list[float]) -> None:
    with pytest.raises(PicassoError, match=r"expected (ascending sizes with one time|times above)"):
        Curve.fit(sizes, ms)


MAX_BYTES = 1 << 20


def _measure(rank: int, world_size: int, ranks_per_host: int) -> CommCurves:
    return CommCurves.measure(
        dist.group.WORLD,
        max_bytes=MAX_BYTES,
        seconds_per_point=0.01,
        ranks_per_host=ranks_per_host,
        budget_s=math.inf,
    )


def test_measured_curves_are_equal_on_all_ranks_and_survive_a_file(tmp_path: Path) -> None:
    curves, other = run_ranks(_measure, 2, 1, timeout_s=60)
    assert curves == other
    assert (curves.world_size, curves.backend, curves.device) == (2, "gloo", "cpu")
    assert set(curves.collectives) == set(COLLECTIVES)
    for name, share in (("all_to_all", 1 / 2), ("all_reduce", 1), ("all_gather", 1 / 2)):
        assert curves.collectives[name].sent_bytes[-1] == int(MAX_BYTES * share)
    path = tmp_path / "curves.json"
    curves.to_json(path)
    assert CommCurves.from_json(path) == curves
    assert list(tmp_path.iterdir()) == [path]


def test_one_rank_costs_nothing_and_cannot_stand_for_two() -> None:
    curves = run_ranks(_measure, 1, 1, timeout_s=30)[0]
    assert all(curves.ms(name, 1e6) == 0 for name in COLLECTIVES)
    with pytest.raises(PlanError, match=r"of 1 rank, without communication, .* has 2 ranks"):
        curves.mismatch(world_size=2, device="cpu")


def test_latency_grows_with_the_peers_and_bandwidth_stays() -> None:
    curves = CommCurves.assumed(2, gbytes_per_s=1.0, latency_ms=0.5)
    assert curves.ms("all_to_all", 1e6) == pytest.approx(1.5)
    assert curves.ms("all_to_all", 1e6, world_size=5) == pytest.approx(4 * 0.5 + 1.0)
    assert curves.ms("all_to_all", 1e6, world_size=1) == 0
    falling = Curve(sent_bytes=(1, 2), ms=(1.0, 0.1), latency_ms=1.0, ms_per_byte=0.0)
    on_five = dataclasses.replace(
        curves, world_size=5, collectives=dict.fromkeys(COLLECTIVES, falling)
    )
    assert on_five.ms("all_to_all", 2, world_size=2) == 0  # no time is below 0
    levels = {**curves.collectives, **dict.fromkeys(LEVELS, curves.collectives["all_to_all"])}
    on_hosts = dataclasses.replace(curves, world_size=4, ranks_per_host=2, collectives=levels)
    assert on_hosts.ms("inside", 1e6, world_size=8) == pytest.approx(1.5)
    assert on_hosts.ms("across", 1e6, world_size=8) == pytest.approx(3 * 0.5 + 1.0)
    for size, places in ((4, 1), (4, 4), (5, 2), (2, 4)):
        with pytest.raises(PicassoError, match=f"are of {size} ranks, {places} per host, expected"):
            dataclasses.replace(on_hosts, world_size=size, ranks_per_host=places)


def _measure_on_hosts(rank: int, world_size: int) -> list[CommCurves]:
    found = []
    for num_places in (4, 2):  # one host, two hosts
        pretend_hosts(rank, num_places)
        found.append(
            CommCurves.measure(dist.group.WORLD, max_bytes=16 << 10, seconds_per_point=0.01)
        )
    return found


def test_exchanges_inside_and_across_hosts_are_measured_where_there_are_several() -> None:
    one, two = run_ranks(_measure_on_hosts, 4, timeout_s=60)[3]
    assert [curves.has_levels for curves in (one, two)] == [False, True]
    assert (one.ranks_per_host, two.ranks_per_host) == (4, 2)
    sent = {name: curve.sent_bytes for name, curve in two.collectives.items()}
    assert sent["inside"] == sent["across"] == (2 << 10, 8 << 10)  # half of the buffer
    assert sent["row_exchange"] == (3 << 10, 12 << 10)


def test_a_mismatch_names_both_sides() -> None:
    curves = CommCurves.assumed(2, gbytes_per_s=1.0, backend="nccl", device="cuda")
    assert curves.mismatch(world_size=2, device="cuda") is None
    assert curves.mismatch(world_size=8, device="cpu") == (
        "curves of 2 ranks, backend nccl on cuda are used for 8 ranks, cpu"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not contain curves"),
        ("[]", "does not contain curves"),
        ("[" * 100_000, r"does not contain curves \(RecursionError"),
        ('{"format_version": 2}', "format version 2, expected 3; measure again"),
        ('{"format_version": 3, "levels": {}, "collectives": {}}', r"curves\.levels is unknown"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "curves.json"
    path.write_text(text)
    with pytest.raises(PicassoError, match=message):
        CommCurves.from_json(path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("collectives.all_to_all.ms", [], r"a curve has 0 times for sizes"),
        ("collectives.all_to_all.ms", [None], r"\.ms\[0\]: expected a number, got None"),
        ("collectives.all_to_all.ms", [10**400], r"\.ms\[0\]: expected a number from 0 to 1e\+18"),
        (
            "collectives.all_to_all.ms",
            [-math.inf],
            r"\.ms\[0\]: expected a number .* got -inf",
        ),
        ("collectives.all_to_all.sent_bytes", [2, 1], r"expected ascending sizes with one time"),
        ("collectives.all_to_all.latency_ms", "1", r"\.latency_ms: expected a number, got '1'"),
        (
            "collectives.all_to_all.ms_per_byte",
            1e19,
            r"ms_per_byte: expected a number from 0 to 1e\+18",
        ),
        ("collectives.all_to_all.more", 1, r"all_to_all\.more is unknown"),
        ("local.stock.forward.row_ns", math.nan, r"stock\.forward\.row_ns: expected .*got nan"),
        ("local.stock.forward", 3, r"local\.stock\.forward: expected a mapping, got 3"),
        ("dense.in_parts", [[2, 1.0]], r"dense\.in_parts\[0\]: expected a list of 3 items"),
        ("dense.in_parts", [[1, 1.0, 1.0]], r"dense\.in_parts is .* ascending"),
        ("dense.forward_ms", -1, r"dense\.forward_ms: expected a number from 0 .*, got -1"),
        ("world_size", 0, r"world_size is 0, expected a number of ranks"),
        ("ranks_per_host", 2**31, r"ranks_per_host is 2147483648, expected a number of ranks"),
        ("backend", 3, r"backend: expected text, got 3"),
        ("wire_core_ns", [], r"wire_core_ns: expected a number, got \[\]"),
        ("measured_on", 1, r"measured_on: expected a mapping, got 1"),
        ("collectives", {}, r"curves of .* are missing"),
    ],
)
def test_wrong_numbers_are_named(tmp_path: Path, path: str, value: object, message: str) -> None:
    file = tmp_path / "curves.json"
    curves = CommCurves.assumed(2, gbytes_per_s=1.0)
    dataclasses.replace(curves, dense=DenseTimes(forward_ms=1.0)).to_json(file)
    document = json.loads(file.read_text())
    *parents, name = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[name] = value
    file.write_text(json.dumps(document))
    with pytest.raises(PicassoError, match=rf"curves\.json does not contain curves: .*{message}"):
        CommCurves.from_json(file)


def test_curves_keep_the_dense_part_and_may_lack_it(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    dense = DenseTimes(forward_ms=3.0, backward_ms=6.5, parameter_bytes=1e6, batch_size=256)
    curves = dataclasses.replace(
        CommCurves.assumed(2, gbytes_per_s=1.0), dense=dense, wire_core_ns=0.7
    )
    curves.to_json(path)
    document = json.loads(path.read_text())
    assert CommCurves.from_json(path) == curves
    del document["dense"], document["wire_core_ns"]
    for side in ("hot_cold", "stock"):
        del document["local"][side]["step_ms"]
        for phase in document["local"][side].values():
            del phase["update_ns"]
    path.write_text(json.dumps(document))
    without = CommCurves.from_json(path)
    assert without.dense is None
    assert without.local.stock.backward.update_ns == 0
    assert without.core_ns_per_byte == 1.0  # assumed, of sockets
    assert dataclasses.replace(without, device="cuda").core_ns_per_byte == 0.0


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(PicassoError, match="there is no curves file"):
        CommCurves.from_json(tmp_path / "none.json")
    curves = CommCurves.assumed(2, gbytes_per_s=1.0)
    with pytest.raises(PicassoError, match="there is no folder"):
        curves.to_json(tmp_path / "none" / "curves.json")
