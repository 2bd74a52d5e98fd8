"""Every schedule is legal, complete and printable; an illegal one is refused, saying why."""

import pytest

from torchrec_picasso.errors import PlanError
from torchrec_picasso.schedule import schedule as schedule_module
from torchrec_picasso.schedule.kinds import KINDS
from torchrec_picasso.schedule.schedule import (
    Op,
    Schedule,
    Setting,
    evaluation_schedule,
    first_batch_schedule,
    second_batch_schedule,
    training_schedule,
)
from torchrec_picasso.train_pipeline.operations import Operations


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 8])
def test_training_schedules_are_legal(num_micro_batches: int, lookahead: bool) -> None:
    schedule = training_schedule(Setting(num_micro_batches, lookahead))
    schedule.check()
    kinds = [op.kind for op in schedule]
    chunks = list(range(num_micro_batches))
    assert [op.index for op in schedule if op.kind == "forward"] == chunks
    assert [op.index for op in schedule if op.kind == "backward"] == chunks[::-1]
    assert [op.index for op in schedule if op.kind == "send_gradients"] == chunks[::-1]
    assert kinds.count("fetch_dirty") == num_micro_batches
    assert kinds.count("fetch_clean") == lookahead
    assert kinds.count("send_dirty_mask") == lookahead
    assert kinds.index("update") < kinds.index("fetch_dirty")
    if lookahead:
        assert kinds.index("fetch_clean") < kinds.index("update")


@pytest.mark.parametrize("forwards_first", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_where_waits_block_no_host_the_mask_goes_before_gradients(
    num_micro_batches: int, forwards_first: bool
) -> None:
    setting = Setting(num_micro_batches, lookahead=True)
    ops = training_schedule(setting, forwards_first=forwards_first).ops
    early = training_schedule(setting, forwards_first=forwards_first, waits_on_stream=True).ops
    assert {*early} == {*ops}
    sent = [[op.kind for op in order if KINDS[op.kind].sends] for order in (early, ops)]
    before, after = (kinds.index("send_dirty_mask") for kinds in sent)
    assert "send_gradients" not in sent[0][:before]
    assert sent[1][after - 2 : after] == ["send_gradients", "reduce_hot"]


@pytest.mark.parametrize("num_waves", [1, 2])
def test_of_two_that_share_no_rows_the_first_sends_gradients_before_the_second_runs(
    num_waves: int,
) -> None:
    setting = Setting(2, lookahead=True)
    schedule = training_schedule(setting, num_waves=num_waves, forwards_first=False)
    ran = ("forward", "send_row_numbers", "backward", "send_gradients")
    order = [(op.kind, op.index, op.wave) for op in schedule if op.kind in ran]
    waves = range(num_waves) if num_waves > 1 else [None]
    assert order == [
        ("forward", 0, None),
        ("backward", 0, None),
        ("send_row_numbers", None, None),
        *(("send_gradients", 0, wave) for wave in waves),
        ("forward", 1, None),
        ("backward", 1, None),
        *(("send_gradients", 1, wave) for wave in waves),
    ]
    fetched = [(op.index, op.wave) for op in schedule if op.kind == "fetch_dirty"]
    assert fetched == [(index, wave) for index in (0, 1) for wave in waves]
    for number in (1, 3, 4):  # only two run depth first
        setting = Setting(number, lookahead=True)
        assert (
            training_schedule(setting, forwards_first=False).ops == training_schedule(setting).ops
        )


def test_micro_batches_that_share_rows_never_run_depth_first() -> None:
    ops = training_schedule(Setting(2, lookahead=True), forwards_first=False).ops
    with pytest.raises(PlanError, match="runs backward 0 before backward 1, which it needs"):
        Schedule(ops).check()


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_evaluation_has_no_backward(num_micro_batches: int, lookahead: bool) -> None:
    schedule = evaluation_schedule(Setting(num_micro_batches, lookahead))
    schedule.check()
    assert not {"backward", "update", "dense_step"} & {op.kind for op in schedule}


def test_the_first_two_batches_come_as_far_as_a_step_leaves_them() -> None:
    """Whatever a step does for the next batch and the one after is done for the first two too."""
    for lookahead in (False, True):
        second = second_batch_schedule(Setting(2, lookahead))
        second.check()
        in_a_step = [op.kind for op in training_schedule(Setting(2, lookahead)) if op.batch == 2]
        assert [op.kind for op in second] == in_a_step
        assert {op.batch for op in second} == {1}
    first = first_batch_schedule(Setting(2, lookahead=True))
    first.check()
    assert {op.batch for op in first} == {0}
    assert [op.kind for op in first][-3:] == ["fetch_dirty", "fetch_dirty", "read_hot"]


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_waves_are_staggered_where_nothing_computes(num_micro_batches: int) -> None:
    schedule = training_schedule(Setting(num_micro_batches, lookahead=True), num_waves=2)
    names = list(map(str, schedule))
    last_backward = names.index("backward 0")
    without_ids = [name for name in names[last_backward + 1 :] if "batch after" not in name]
    assert without_ids[:8] == [
        "send_gradients 0 wave 0",
        "reduce_hot wave 0",
        "send_gradients 0 wave 1",
        "reduce_hot wave 1",
        "update wave 0",
        "fetch_dirty 0 wave 0 of the next batch",
        "update wave 1",
        "fetch_dirty 0 wave 1 of the next batch",
    ]
    assert not any("wave" in name for name in names[:last_backward])
    in_one = training_schedule(Setting(num_micro_batches, lookahead=True))
    assert len(schedule.ops) == len(in_one.ops) + 4


@pytest.mark.parametrize("num_waves", [1, 2, 5])
def test_every_schedule_fetches_every_chunk_of_every_wave_once(num_waves: int) -> None:
    setting = Setting(3, lookahead=True)
    expected = [0] * num_waves + [1, 2]
    for schedule in (
        training_schedule(setting, num_waves=num_waves),
        evaluation_schedule(setting, num_waves=num_waves),
        first_batch_schedule(setting, num_waves=num_waves),
    ):
        fetched = [op for op in schedule if op.kind == "fetch_dirty"]
        assert [op.index for op in fetched] == expected
        assert len(set(fetched)) == len(fetched)


def test_a_wave_waits_for_its_own_update_only() -> None:
    update, fetch = [Op("update", wave=w) for w in (0, 1)], Op("fetch_dirty", 1, 0, 0)
    Schedule((update[0], fetch, update[1])).check()
    with pytest.raises(PlanError, match="before update wave 0, which it needs"):
        Schedule((update[1], fetch, update[0])).check()
    with pytest.raises(PlanError, match="before update wave 1, which it needs"):
        Schedule((update[0], Op("fetch_dirty", 1, 1), update[1])).check()


def test_an_illegal_schedule_is_refused() -> None:
    early = Schedule((Op("fetch_dirty", 1, 0), Op("update")))
    with pytest.raises(
        PlanError, match="runs fetch_dirty 0 of the next batch before update, which it needs"
    ):
        early.check()
    with pytest.raises(PlanError, match="runs update twice"):
        Schedule((Op("update"), Op("update"))).check()


def test_a_kind_that_does_not_exist_is_refused() -> None:
    why = "no operation is called 'fetch_durty'; one of send_header, "
    with pytest.raises(PlanError, match=why):
        Op("fetch_durty")


def test_gradients_need_a_backward() -> None:
    with pytest.raises(PlanError, match="runs send_gradients 0 without the backward it needs"):
        Schedule((Op("forward", 0, 0), Op("send_gradients", 0, 0))).check()


def test_every_kind_has_a_method_and_a_place_in_a_schedule() -> None:
    assert all(callable(getattr(Operations, f"_{kind}")) for kind in KINDS)
    assert {op.kind for op in training_schedule(Setting(2, lookahead=True))} == set(KINDS)


def test_the_frame_has_a_line_per_operation() -> None:
    schedule = training_schedule(Setting(2, lookahead=True))
    frame = schedule.to_frame()
    assert list(frame.columns) == ["op", "batch", "index", "wave", "collective"]
    assert len(frame) == len(schedule.ops) == len(str(schedule).splitlines())
    assert set(frame.loc[frame["collective"], "op"]) == {
        name for name, kind in KINDS.items() if kind.sends
    }


def test_a_schedule_is_checked_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost_layout(batch: int, setting: Setting) -> list[Op]:
        return [Op("build_layout", batch), Op("receive_row_numbers", batch)]

    training_schedule.cache_clear()
    monkeypatch.setattr(schedule_module, "_row_numbers_arrive", lost_layout)
    with pytest.raises(
        PlanError, match="before receive_row_numbers of the batch after, which it needs"
    ):
        training_schedule(Setting(2, lookahead=True))
