"""Files of clicks in windows: what is read, drawn and held out, against the whole file.

Rows with histories of their own first, then a log, whose histories are the clicks before.
"""

from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data import alimama, globo
from torchrec_picasso.app.zoo.data.click_files import ClickFile, read_clicks
from torchrec_picasso.app.zoo.data.click_source import ClickSource
from torchrec_picasso.errors import InputError

NUM_ROWS, GROUP_ROWS, WINDOW = 600, 100, 250
BATCH = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows whose user is their place in the file."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, NUM_ROWS)
    frame = pd.DataFrame({column: rng.integers(1, 40, NUM_ROWS) for column in alimama.COLUMNS})
    frame["clk"] = rng.integers(0, 2, NUM_ROWS)
    frame["user_id"] = np.arange(NUM_ROWS)
    for column in ("tag_category_list", "tag_brand_list"):
        frame[column] = [rng.integers(1, 60, length).tolist() for length in lengths]
    path: Path = tmp_path_factory.mktemp("alimama") / "rows.parquet"
    frame.to_parquet(path, row_group_size=GROUP_ROWS)
    return path


@pytest.fixture
def windowed(path: Path) -> ClickSource:
    data = DataConfig(kind="clicks", path=str(path), batch_size=BATCH, heldout_steps=2)
    return ClickSource(data, seed=0, most_samples=WINDOW)


def users_of(batch: Batch) -> list[int]:
    return (batch.sparse_features["user_id"].values() - 1).tolist()


@pytest.mark.parametrize(
    ("most_samples", "expected"), [(WINDOW, [200, 200, 200]), (50, [100] * 6), (600, [600])]
)
def test_windows_are_whole_row_groups(path: Path, most_samples: int, expected: list[int]) -> None:
    file = ClickFile(path, most_samples)
    windows = [file.window(number) for number in range(file.num_windows)]
    assert list(map(len, windows)) == expected
    assert [file.num_samples(number) for number in range(len(windows))] == expected
    whole = read_clicks(path)
    joined = np.concatenate([of.histories["brand"].joined() for of in windows])
    assert joined.tolist() == whole.histories["brand"].joined().tolist()
    for column in whole.profiles:
        together = np.concatenate([of.profiles[column] for of in windows])
        assert together.tolist() == whole.profiles[column].tolist()


@pytest.mark.parametrize("with_statistics", [True, False])
def test_largest_ids_are_those_of_the_whole_file(
    path: Path, tmp_path: Path, with_statistics: bool
) -> None:
    if not with_statistics:
        frame, path = pd.read_parquet(path), tmp_path / "plain.parquet"
        frame.to_parquet(path, row_group_size=GROUP_ROWS, write_statistics=False)
    whole, file = read_clicks(path), ClickFile(path, WINDOW)
    for column in (*whole.profiles, *whole.targets):
        assert file.num_rows(column) == whole.num_rows(column)


def test_each_window_serves_as_many_steps_as_it_has_samples_for(windowed: ClickSource) -> None:
    steps = 200 // (2 * BATCH)
    batches = [users_of(batch) for batch in islice(windowed.batches(1, 2), 3 * steps + 1)]
    windows = [{user // 200 for user in users} for users in batches]
    assert windows == [{0}] * steps + [{1}] * steps + [{2}] * steps + [{0}]
    again = next(windowed.batches(1, 2, start_step=steps + 3))
    assert users_of(again) == batches[steps + 3]


def test_what_is_held_out_is_never_trained_on(windowed: ClickSource) -> None:
    heldout = [user for rank in range(2) for b in windowed.heldout(rank, 2) for user in users_of(b)]
    assert len(set(heldout)) == len(heldout) == 2 * 2 * BATCH
    assert len({user // 200 for user in heldout}) > 1
    steps = 6 * NUM_ROWS // (2 * BATCH)
    batches = [b for rank in range(2) for b in islice(windowed.batches(rank, 2), steps)]
    trained = {user for batch in batches for user in users_of(batch)}
    assert not trained & set(heldout)
    assert len(trained) > 0.8 * NUM_ROWS


def test_too_few_can_be_held_out(path: Path) -> None:
    data = DataConfig(kind="clicks", path=str(path), batch_size=BATCH, heldout_steps=20)
    with pytest.raises(InputError, match=r"samples can be held out, but 320 are needed"):
        next(ClickSource(data, seed=0).heldout(0, 2))


NUM_CLICKS, LOG_WINDOW, NUM_USERS = 900, 150, 12


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clicks whose article is their place in the file, in two row groups."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({column: rng.integers(0, 9, NUM_CLICKS) for column in globo.COLUMNS})
    frame["ts_ms"] = np.arange(NUM_CLICKS) // 3
    frame["article"] = np.arange(NUM_CLICKS)
    frame["user"] = rng.integers(0, NUM_USERS, NUM_CLICKS)
    path: Path = tmp_path_factory.mktemp("globo") / "log.parquet"
    frame.to_parquet(path, row_group_size=500)
    return path


def source_of(path: Path, heldout_steps: int = 4) -> ClickSource:
    data = DataConfig(
        kind="clicks", path=str(path), batch_size=BATCH, heldout_steps=heldout_steps, max_history=9
    )
    return ClickSource(data, seed=0, most_samples=2 * LOG_WINDOW)


def clicks_of(batch: Batch) -> list[int]:
    """Places of the clicks that happened."""
    articles = batch.sparse_features["article"].values() - 1
    return articles[batch.labels > 0.5].tolist()


def test_a_log_has_windows_of_rows_with_the_clicks_before_as_history(log: Path) -> None:
    users = pd.read_parquet(log)["user"].to_numpy()
    file = ClickFile(log, 2 * LOG_WINDOW)
    assert file.num_windows == NUM_CLICKS // LOG_WINDOW
    for number in range(file.num_windows):
        start = number * LOG_WINDOW
        clicks = file.window(number)
        happened = clicks.clicked > 0.5
        articles = clicks.targets["article"] - 1
        assert articles[happened].tolist() == list(range(max(start, 1), start + LOG_WINDOW))
        assert (articles[~happened] >= start - LOG_WINDOW).all()
        assert len(clicks) <= file.num_samples(number)
        for sample in range(0, len(clicks), 7):
            click = articles[: sample + 1][happened[: sample + 1]].max()
            mine = users[: click + 1] == users[click]
            before = [place for place in np.flatnonzero(mine)[:-1] if place >= start - LOG_WINDOW]
            found = clicks.histories["article"][sample] - 1
            assert found.tolist() == before[-50:]


def test_a_log_is_trained_on_from_its_middle_and_held_out_before(log: Path) -> None:
    steps = 2 * LOG_WINDOW // (2 * BATCH)
    batches = [clicks_of(batch) for batch in islice(source_of(log).batches(0, 2), 3 * steps + 1)]
    windows = [{click // LOG_WINDOW for click in clicks} for clicks in batches]
    assert windows == [{3}] * steps + [{4}] * steps + [{5}] * steps + [{3}]
    assert batches[3 * steps] == batches[0]
    again = next(source_of(log).batches(0, 2, start_step=steps + 3))
    assert clicks_of(again) == batches[steps + 3]
    ranks = [source_of(log).batches(rank, 2) for rank in range(2)]
    in_turn = [click for _ in range(3) for rank in ranks for click in clicks_of(next(rank))]
    assert in_turn == list(range(3 * LOG_WINDOW, 3 * LOG_WINDOW + len(in_turn)))

    source = source_of(log, heldout_steps=13)
    heldout = [c for rank in range(2) for b in source.heldout(rank, 2) for c in clicks_of(b)]
    assert len(set(heldout)) == len(heldout)
    assert {click // LOG_WINDOW for click in heldout} == {1, 2}
    with pytest.raises(InputError, match="samples can be held out, but 480 are needed"):
        next(source_of(log, heldout_steps=30).heldout(0, 2))


def test_rows_of_a_log_are_those_of_its_file(log: Path) -> None:
    file, frame = ClickFile(log, 2 * LOG_WINDOW), pd.read_parquet(log)
    for column in ("article", "user", "device"):
        assert file.num_rows(column) == frame[column].max() + 2


def test_a_long_log_must_be_in_time_order(log: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled.parquet"
    pd.read_parquet(log).sample(frac=1, random_state=0).to_parquet(shuffled)
    with pytest.raises(InputError, match=r"rows 450 to 600 are not in order of ts_ms, .* sort the"):
        ClickFile(shuffled, 2 * LOG_WINDOW).window(3)
    in_memory = ClickFile(shuffled, 2 * NUM_CLICKS).window(0)
    assert in_memory.targets["article"].max() == NUM_CLICKS  # one window is sorted
