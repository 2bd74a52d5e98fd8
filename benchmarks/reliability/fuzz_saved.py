"""What a run saves, and what is done to it: the checkpoint, and the hot set beside it."""

from __future__ import annotations

import io
import pickle
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.reliability.fuzz_mutations import HOSTILE_VALUES, RunsWhenUnpickled, mutated_bytes
from benchmarks.reliability.fuzz_target import Target
from benchmarks.reliability.small_model import BAGS, SEQUENCES
from benchmarks.reliability.small_trainer import SmallTrainer
from benchmarks.reliability.whole_state import differences, join_state
from torchrec_picasso import HotColdParams
from torchrec_picasso.app.checkpoints.hot_rows import read_hot_rows, write_hot_rows
from torchrec_picasso.app.checkpoints.load import load_checkpoint
from torchrec_picasso.app.checkpoints.write import save_checkpoint

__all__ = ["Checkpoints", "HotRows"]


class HotRows(Target):
    """The hot set beside a checkpoint."""

    def seeds(self, folder: Path) -> list[Path]:
        rows = {name: torch.arange(0, rows, 3) for name, (rows, _) in {**BAGS, **SEQUENCES}.items()}
        write_hot_rows(folder, rows)
        return [folder / "hot_rows.pt"]

    def change(self, draw: random.Random, seed: Path, marker: Path) -> tuple[str, bytes]:
        if draw.random() < 0.6:
            return mutated_bytes(draw, seed.read_bytes())
        rows = torch.load(seed, weights_only=True)
        others: Mapping[str, Any] = {
            "malicious": RunsWhenUnpickled(marker),
            "malicious inside": {**rows, "user": RunsWhenUnpickled(marker)},
            "floats": {**rows, "user": torch.rand(3)},
            "two dims": {**rows, "user": torch.zeros(2, 2, dtype=torch.int64)},
            "negative": {**rows, "user": torch.tensor([-1, 2])},
            "twice": {**rows, "user": torch.tensor([2, 2])},
            "descending": {**rows, "user": torch.tensor([5, 2])},
            "number as name": {1: torch.tensor([2])},
            "a sparse one": {**rows, "user": torch.tensor([1, 2]).to_sparse()},
            "without storage": {**rows, "user": torch.zeros(10**12, device="meta").long()},
            "expanded": {**rows, "user": torch.zeros(1, dtype=torch.int64).expand(10**10)},
            "other": draw.choice(HOSTILE_VALUES),
            "other inside": {"user": draw.choice(HOSTILE_VALUES)},
        }
        name = draw.choice(sorted(others))
        if draw.random() < 0.3 and name != "expanded":  # which a bare pickle holds as it looks
            return f"{name}, a bare pickle", pickle.dumps(others[name], draw.choice((0, 2, 4)))
        content = io.BytesIO()
        torch.save(others[name], content, _use_new_zipfile_serialization=draw.random() < 0.8)
        return name, content.getvalue()

    def use(self, path: Path) -> None:
        for rows in (read_hot_rows(path.parent) or {}).values():
            HotColdParams(hot_rows=rows)


class Checkpoints(Target):
    """Whole checkpoints, of which one file is damaged."""

    def seeds(self, folder: Path) -> list[Path]:
        self._trainer = SmallTrainer("rows", "rowwise_adagrad")
        self._trainer.train(range(2))
        self._saved = join_state(self._trainer.state())
        return [save_checkpoint(folder, 2, self._trainer.state())]

    def change(self, draw: random.Random, seed: Path, marker: Path) -> tuple[str, bytes]:
        how = draw.random()
        if how < 0.15 and seed.name == ".metadata":
            return "malicious", pickle.dumps(RunsWhenUnpickled(marker))
        if how < 0.25:
            return "another pickle", pickle.dumps(draw.choice(HOSTILE_VALUES))
        return mutated_bytes(draw, seed.read_bytes())

    def damage(self, draw: random.Random, folder: Path, marker: Path) -> tuple[str, Path]:
        path = folder / self._seeds[0].name
        shutil.copytree(self._seeds[0], path)
        file = draw.choice(sorted(of for of in path.iterdir() if of.is_file()))
        if draw.random() < 0.1:
            file.unlink()
            return f"without {file.name}", path
        what, content = self.change(draw, file, marker)
        file.write_bytes(content)
        return f"{file.name}: {what}", path

    def use(self, path: Path) -> None:
        load_checkpoint(path, self._trainer.state(), self._trainer.load_state)
        wrong = differences(join_state(self._trainer.state()), self._saved)
        assert not wrong, f"other values than were saved: {', '.join(wrong)}"
