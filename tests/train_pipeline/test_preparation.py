"""Ids that a data loader prepared: the step trains the same bits, and refuses the same batches."""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.sharding.jobs import ODD, PLAIN, Job, Model, build, result_of_module, shard
from tests.sharding.sequence_jobs import TABLES_OF, SequenceJob, build_sequences
from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.support.tables import Table, bags_of
from tests.train_pipeline.runs import Run, batches_of, compare_runs, pipeline_of, run_to_the_end
from torchrec_picasso import InputError, Refresh
from torchrec_picasso.batches.feed import PreparedBatch
from torchrec_picasso.train_pipeline.step_report import StepReports

OFTEN = Refresh(every_steps=2, half_life_steps=2, deviations=0.0, most_moved=1.0, check_steps=None)
SUMS = tuple(replace(table, mean=False) for table in PLAIN)
JOBS: dict[str, Job] = {
    "rows": Job(placement={"*": 3, "one_row": 1}, tables=ODD, batch_sizes=(16, 9)),
    "waves": Job(placement={"*": 2}, waves={"a": 1}),
    "by host": Job(placement={"*": 2}, by_host=("*",), batch_sizes=(16, 9, 3, 5)),
    "weights, bags beside": Job(placement={"*": 4, "c": "bags"}, tables=SUMS, weighted=True),
    "stock beside": Job(placement={"*": 2, "b": "table_wise"}),
    "sequences, three modules": SequenceJob(placement={"*": 3}),
    "bags alone": Job(placement={"*": "bags"}, tables=SUMS),
    "stock": Job(placement={"*": "table_wise"}),
    "made ahead of the model": Job(placement={"*": 2}),
}
MOVING = ("rows", "waves", "by host", "weights, bags beside")
NEVER = ("bags alone", "stock", "made ahead of the model")
SETTINGS = ((1, False), (4, True))
STEPS = (6, 4, 5, 3)
"""Batches of each rank."""


class _Shift(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=features.keys(), values=features.values() // 2, lengths=features.lengths()
        )


class _Shifted(nn.Module):
    """Tables behind a module without parameters."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.shift, self.inside = _Shift(), inside

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.inside(self.shift(features))


def _built(name: str, rank: int, world_size: int) -> Any:
    job = JOBS[name]
    if isinstance(job, SequenceJob):
        return build_sequences(job, world_size)
    if name in NEVER[2:]:
        model = Model(job)
        model.ebc = _Shifted(model.ebc)
        return shard(model, job, {"ebc.inside": job.tables}, world_size)
    return build(job, rank, world_size)


def _collections(name: str) -> tuple[str, ...]:
    if isinstance(JOBS[name], SequenceJob):
        return tuple(TABLES_OF)
    return ("inside",) if name in NEVER[2:] else ("ebc",)


def _sent(prepare: Any, batches: Sequence[Batch]) -> Iterator[Any]:
    """Batches prepared in another process would come so."""
    prepare = pickle.loads(pickle.dumps(prepare))
    return (pickle.loads(pickle.dumps(prepare(batch))) for batch in batches)


def _train(
    name: str, rank: int, world_size: int, setting: tuple[int, bool], is_prepared: bool
) -> tuple[Run, str]:
    """Training of uneven length with refreshes, then an evaluation."""
    batches = batches_of(JOBS[name], rank, range(STEPS[rank]))
    model = _built(name, rank, world_size)
    reports = StepReports()
    pipeline = pipeline_of(
        model,
        num_micro_batches=setting[0],
        lookahead=setting[1],
        refresh=OFTEN,
        pipeline_postproc=name in NEVER[2:],
        on_step=reports,
    )
    send = partial(_sent, pipeline.preparation()) if is_prepared else iter
    outputs = run_to_the_end(pipeline, send(batches))
    model.eval()
    with torch.no_grad():
        outputs += run_to_the_end(pipeline, send(batches))
    if name in MOVING:
        assert any(r.refreshed is not None and r.refreshed.num_moved for r in reports.reports)
    return (result_of_module(model, [], _collections(name)), outputs), pipeline.summary()


def _train_all(rank: int, world_size: int, name: str) -> Any:
    runs, summaries = {}, {}
    for setting in SETTINGS:
        for is_prepared in (False, True):
            found = _train(name, rank, world_size, setting, is_prepared)
            runs[setting, is_prepared], summaries[setting, is_prepared] = found
    return runs, summaries


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_trains_the_same_bits(name: str, setting: tuple[int, bool]) -> None:
    by_rank, summaries = zip(*run_once(_train_all, 4 if JOBS[name].by_host else 2, name))
    compare_runs(by_rank, (setting, True), (setting, False), rtol=0, atol=0)
    for rank, lines in enumerate(summaries):
        assert "prepared" not in lines[setting, False]
        used_again = _counts(lines[setting, True])
        if name in NEVER:
            assert used_again is None
        elif "sequences" not in name or setting[0] == 1:
            assert used_again[1] == 0
            assert used_again[0] >= 2 * STEPS[rank]
        else:  # evaluation is in one micro-batch
            assert min(used_again) >= STEPS[rank]


def _counts(summary: str) -> Any:
    """Exchanges that used prepared ids, and those that read them again."""
    lines = [line for line in summary.splitlines() if "prepared" in line]
    words = "".join(lines).replace(":", "").split()
    return tuple(int(word) for word in words if word.isdigit()) if lines else None


def _bad(batch: Batch, kind: str) -> Batch:
    features = batch.sparse_features
    ids, lengths = features.values().clone(), features.lengths().clone()
    if kind == "id":
        ids[3] = 10**6
    else:
        lengths[0] += 2
    features = KeyedJaggedTensor(keys=features.keys(), values=ids, lengths=lengths)
    return replace(batch, sparse_features=features)


def _refused(rank: int, world_size: int) -> list[tuple[str, str]]:
    problems = []
    for kind in ("id", "lengths"):
        own = []
        for is_prepared in (False, True):
            pipeline = pipeline_of(build(JOBS["rows"], rank, 2), num_micro_batches=1)
            batches = batches_of(JOBS["rows"], rank, range(3))
            if rank == 1:
                batches[2] = _bad(batches[2], kind)
            prepare = pipeline.preparation() if is_prepared else lambda batch: batch
            own.append(refusal(InputError, run_to_the_end, pipeline, map(prepare, batches)))
        problems.append(tuple(own))
    return problems


def test_bad_input_is_refused_on_all_ranks_alike() -> None:
    for on_rank in run_once(_refused, 2):
        for without, prepared in on_rank:
            assert without == prepared


def _halved(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    features.values().div_(2, rounding_mode="floor")
    return features


def _halved_by_numpy(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    features.values().numpy()[:] //= 2
    return features


def _other_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths = features.lengths().view(len(features.keys()), -1).flip(1)  # as many of each feature
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths.flatten())


CHANGES = (_halved, _halved_by_numpy, _other_lengths, lambda features: features)


def _changed_since(rank: int, world_size: int) -> Any:
    """Each batch after its preparation, in place or by other features; the last is as it was."""
    runs = {}
    for is_prepared in (True, False):
        model = build(JOBS["rows"], rank, 2)
        pipeline = pipeline_of(model, num_micro_batches=1)
        batches = batches_of(JOBS["rows"], rank, range(len(CHANGES)))
        given = list(map(pipeline.preparation(), batches)) if is_prepared else batches
        for batch, change in zip(batches, CHANGES):
            batch.sparse_features = change(batch.sparse_features)
        outputs = run_to_the_end(pipeline, iter(given))
        runs[is_prepared] = result_of_module(model, [], ("ebc",)), outputs
        if is_prepared:
            assert _counts(pipeline.summary()) == (1, len(CHANGES) - 1)
    return runs


def test_ids_that_changed_since_are_read_again() -> None:
    compare_runs(run_once(_changed_since, 2), True, False, rtol=0, atol=0)


class _Numbers(torch.utils.data.Dataset):
    """Batches by number, made in the worker."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return STEPS[self._rank]

    def __getitem__(self, step: int) -> Batch:
        (batch,) = batches_of(JOBS["rows"], self._rank, [step])
        return batch


def _by_workers(rank: int, world_size: int) -> tuple[dict[bool, Run], str]:
    """A run of batches that workers make and prepare, and one without them; what the first says."""
    runs, summary = {}, ""
    for has_workers in (True, False):
        model = build(JOBS["rows"], rank, 2)
        before = model.module.ebc.forward
        pipeline = pipeline_of(model, num_micro_batches=1, lookahead=False, refresh=OFTEN)
        batches: Any = batches_of(JOBS["rows"], rank, range(STEPS[rank]))
        if has_workers:
            batches = DataLoader(
                _Numbers(rank),
                batch_size=None,
                collate_fn=pipeline.preparation(),
                num_workers=2,
                multiprocessing_context="fork" if rank else "spawn",
            )
            assert model.module.ebc.forward == before  # the model is as it was
        outputs = run_to_the_end(pipeline, iter(batches))
        runs[has_workers] = result_of_module(model, [], ("ebc",)), outputs
        summary = summary or pipeline.summary()
    return runs, summary


def test_workers_of_a_data_loader_prepare() -> None:
    by_rank, lines = zip(*run_once(_by_workers, 2))
    for rank, summary in enumerate(lines):
        used, again = _counts(summary)  # a refresh requests batches in flight again
        assert used >= STEPS[rank]
        assert again == 0
    compare_runs(by_rank, True, False, rtol=0, atol=0)


USER = Table("user", 8, 20, ("user",))


@dataclass
class _Visits(Pipelineable):
    """Samples that share users, fewer than samples."""

    visits: KeyedJaggedTensor
    users: KeyedJaggedTensor
    user_of_sample: Tensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "_Visits":
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass


class _ByUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.visits, self.users = bags_of(PLAIN[:1]), bags_of([USER])
        self.over = nn.Linear(16, 1)

    def forward(self, batch: _Visits) -> tuple[Tensor, Tensor]:
        users_BD = self.users(batch.users)["user"].index_select(0, batch.user_of_sample)
        out = self.over(torch.cat([self.visits(batch.visits)["f0"], users_BD], 1)).squeeze(1)
        return ((out - batch.labels) ** 2).sum() / 6, out.detach()


def _visits(rank: int, step: int) -> _Visits:
    generator = torch.Generator().manual_seed(10 * step + rank)
    draw = partial(torch.randint, generator=generator)
    both = []
    for feature, num, num_rows in (("f0", 16, 60), ("user", 5, 20)):
        lengths = draw(4, (num,))
        values = draw(num_rows, (int(lengths.sum()),))
        both.append(KeyedJaggedTensor([feature], values, lengths=lengths))
    return _Visits(*both, draw(5, (16,)), torch.rand(16, generator=generator))


def _by_user(rank: int, world_size: int) -> dict[bool, Run]:
    runs = {}
    for is_prepared in (True, False):
        tables_of = {"visits": PLAIN[:1], "users": (USER,)}
        model = shard(_ByUser(), Job(placement={"*": 3}), tables_of, world_size)
        pipeline = pipeline_of(model, num_micro_batches=1)
        send = partial(_sent, pipeline.preparation()) if is_prepared else iter
        outputs = run_to_the_end(pipeline, send([_visits(rank, step) for step in range(4)]))
        runs[is_prepared] = result_of_module(model, [], tuple(tables_of)), outputs
        if is_prepared:
            assert _counts(pipeline.summary()) == (4, 4)  # the users have their own batch size
    return runs


def test_modules_whose_features_have_other_numbers_of_samples_are_read_apart() -> None:
    compare_runs(run_once(_by_user, 2), True, False, rtol=0, atol=0)


def _what_it_holds(rank: int, world_size: int) -> None:
    many = Job(placement={"a": 60, "*": 2})
    model = build(many, rank, 1)
    prepare = pipeline_of(model).preparation()
    (batch,) = batches_of(many, rank, [0])
    prepared = prepare(batch)
    assert isinstance(prepared, PreparedBatch)
    assert prepared.batch is batch
    assert prepare(prepared) is prepared
    assert len(pickle.dumps(prepare)) < 10_000
    moved = prepared.to(device=torch.device("cpu"), non_blocking=True)
    assert type(moved.batch) is Batch
    for names, ids in prepared.ids_of.items():
        assert torch.equal(moved.ids_of[names].values, ids.values)
    # a model that differs in a table reads the ids again
    other = pipeline_of(build(replace(many, tables=SUMS[:2]), rank, 1), num_micro_batches=1)
    other.progress(iter([prepared]))
    assert _counts(other.summary()) is None
    stock = replace(many, placement={"*": "table_wise"})
    outputs = [pipeline_of(build(stock, rank, 1)).progress(iter([b])) for b in (batch, prepared)]
    assert torch.equal(*outputs)
    elsewhere = replace(batch, sparse_features=batch.sparse_features.to(torch.device("meta")))
    assert prepare(elsewhere) is elsewhere
    features = batch.sparse_features
    strides = [[stride] for stride in (16, 16, 16, 16)]
    strides[0], lengths = [4], features.lengths()[12:].clone()
    lengths[0] = features.lengths()[:13].sum()
    varied = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=lengths,
        stride_per_key_per_rank=strides,
    )
    odd = replace(batch, sparse_features=varied)
    assert prepare(odd) is odd


def test_it_is_small_and_fits_one_model() -> None:
    run_once(_what_it_holds, 1)
