"""The length of a step by its schedule, against steps that can be worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_picasso.cost.schedule_time import Message, OpTime, StepPrice, simulate_step
from torchrec_picasso.errors import PlanError
from torchrec_picasso.schedule.kinds import KINDS
from torchrec_picasso.schedule.schedule import Setting, training_schedule

WHOLE = Setting(1, lookahead=True)

Times = dict[tuple[str, int | None], OpTime]
PER_PART = ("forward", "backward", "send_gradients", "fetch_dirty")
WORK = ("forward", "backward", "update")


def send(ms: float, core_share: float = 0.0) -> OpTime:
    return OpTime(message=Message(ms, core_share))


def times_of(**by_kind: float | OpTime | list[float]) -> Times:
    """Times by kind, in a list by part; a number is work, or the wire's time."""
    times: Times = {}
    for kind, found in by_kind.items():
        for part, time in enumerate(found if isinstance(found, list) else [found]):
            if not isinstance(time, OpTime):
                time = OpTime(compute_ms=time) if kind in WORK else send(time)
            times[kind, part if kind in PER_PART else None] = time
    return times


def step_ms(setting: Setting = WHOLE, **by_kind: float | OpTime | list[float]) -> float:
    return simulate_step(setting, times_of(**by_kind)).step_ms


def test_work_alone_lasts_as_long_as_it_takes() -> None:
    times = times_of(forward=3, backward=4, update=2)
    assert simulate_step(WHOLE, times) == StepPrice(step_ms=9, wire_ms=0, compute_ms=9)


def test_what_no_operation_waits_for_at_once_is_hidden() -> None:
    # clean rows of the next batch have all of this step to come
    times = times_of(forward=10, fetch_clean=7)
    assert simulate_step(WHOLE, times) == StepPrice(step_ms=10, wire_ms=7, compute_ms=10)


def test_where_steps_meet_rows_and_gradients_of_a_whole_batch_are_exposed() -> None:
    found = step_ms(forward=10, backward=10, send_gradients=5, fetch_dirty=4)
    assert found == pytest.approx(29)


def test_flags_travel_beside_operations_that_lead() -> None:
    times = {("send_header", None): OpTime(4), ("forward", 0): OpTime(10)}
    found = simulate_step(WHOLE, times, flags=Message(6))
    assert found == StepPrice(step_ms=6 + 10, wire_ms=6, compute_ms=14)
    # chunk 1 is on the wire (12) when the step begins; forward 0 waits for the flags (1) alone
    times = times_of(forward=[10, 0], fetch_dirty=[0, 12])
    found = simulate_step(Setting(2, lookahead=True), times, flags=Message(1))
    assert found.step_ms == found.wire_ms == 13


def test_of_two_micro_batches_only_the_first_chunk_is_exposed() -> None:
    # backward: part 1 (9), its gradients (6) beside part 0 (3); then part 0's (2) behind them; the
    # update comes after 3 + 6 = 9 + ... = 9 + max(3, 6) + 2. Dirty rows: chunk 0 (1) is waited for,
    # chunk 1 (3) travels while part 0's forward runs (2) and is waited for 1 ms
    setting = Setting(2, lookahead=True)
    found = step_ms(
        setting, forward=[2, 6], backward=[3, 9], send_gradients=[2, 6], fetch_dirty=[1, 3]
    )
    assert found == pytest.approx(1 + 2 + (3 - 2) + 6 + 9 + 6 + 2)


def test_depth_first_the_wire_never_waits_for_a_second_forward() -> None:
    # Rows of both parts (4 each) travel in 8, their gradients in 8 more. Depth first, part 0 ends
    # (4 + 3 = 7) before the rows of part 1 arrive (8), and part 1 ends (11) before the gradients of
    # part 0 have arrived (12). Otherwise the wire waits for backward of part 1 (8 + 1 + 2).
    times = times_of(forward=[1, 1], backward=[2, 2], send_gradients=[4, 4], fetch_dirty=[4, 4])
    setting = Setting(2, lookahead=True)
    assert simulate_step(setting, times, forwards_first=False).step_ms == pytest.approx(16)
    assert simulate_step(setting, times).step_ms == pytest.approx(19)


def test_each_wave_sends_a_share_of_the_bytes_with_the_whole_latency() -> None:
    times = times_of(send_gradients=OpTime(message=Message(4.0, latency_ms=1.0)))
    assert simulate_step(WHOLE, times, (0.25, 0.75)).wire_ms == pytest.approx(2 * 1 + 3)


def test_a_wave_is_updated_while_the_other_is_on_the_wire() -> None:
    # after backward: gradients until 4 and 8; updates from 4 to 10 and on to 16; dirty rows of the
    # first wave from 10 to 14, of the second from 16 to 20. In one wave: 8 + 12 + 8
    times = times_of(forward=10, backward=10, send_gradients=8, update=12, fetch_dirty=8)
    assert simulate_step(WHOLE, times).step_ms == pytest.approx(20 + 28)
    in_waves = simulate_step(WHOLE, times, (0.5, 0.5))
    assert in_waves.step_ms == pytest.approx(20 + 20)
    assert in_waves.wire_ms == pytest.approx(16)
    assert in_waves.compute_ms == pytest.approx(32)
    uneven = simulate_step(WHOLE, times, (0.25, 0.75))
    assert 20 + 20 < uneven.step_ms < 20 + 28


def test_a_message_that_takes_the_core_hides_nothing() -> None:
    assert step_ms(forward=10, fetch_clean=send(7, core_share=1.0)) == pytest.approx(17)
    assert step_ms(forward=10, fetch_clean=send(7, core_share=0.5)) == pytest.approx(13.5)


def test_an_exposed_exchange_waits_behind_what_is_on_the_wire() -> None:
    times = times_of(forward=OpTime(compute_ms=12, first=Message(5)))
    assert simulate_step(WHOLE, times) == StepPrice(step_ms=17, wire_ms=5, compute_ms=12)
    times["fetch_clean", None] = send(8)  # of the next batch, sent just before
    assert simulate_step(WHOLE, times).step_ms == pytest.approx(8 + 5 + 2 + 10)


def test_a_wire_with_too_much_to_do_sets_the_pace() -> None:
    assert step_ms(forward=5, fetch_clean=50, send_gradients=40) == pytest.approx(90)


def test_only_what_sends_has_a_message() -> None:
    with pytest.raises(PlanError, match="forward was given a message, but it does not send"):
        simulate_step(WHOLE, {("forward", 0): send(1)})


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_parts=st.sampled_from([1, 2, 4]), lookahead=st.booleans())
def test_no_step_is_shorter_than_its_bounds_or_longer_than_their_sum(
    data: st.DataObject, num_parts: int, lookahead: bool
) -> None:
    setting, times = Setting(num_parts, lookahead), {}
    for op in training_schedule(setting):
        message = None
        if KINDS[op.kind].sends:
            message = Message(data.draw(st.floats(0, 20)), data.draw(st.floats(0, 1)))
        times[op.kind, op.index] = OpTime(data.draw(st.floats(0, 20)), message)
    length = simulate_step(setting, times)
    assert max(length.wire_ms, length.compute_ms) <= length.step_ms + 1e-6
    assert length.step_ms <= length.wire_ms + length.compute_ms + 1e-6


def test_something_waits_for_every_message() -> None:
    # a kind that sends and that nothing waits for would cost nothing wherever the wire is free
    waited = {need.kind for kind in KINDS.values() for need in kind.needs}
    assert waited >= {name for name, kind in KINDS.items() if kind.sends}
