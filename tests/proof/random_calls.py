"""Random calls of PyTorch, each beside what the rules say of its result.

A program of calls grows on tensors without data, followed by the rules; a call that they do not
understand is left out. The others run with data too, on a whole batch and on its parts, and every
result must lie along the batch as the rules say.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.proof.calls import ONE, TWO, WRITING
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.proof.follow import Follower
from torchrec_picasso.proof.inputs import Inputs
from torchrec_picasso.proof.values import SAMPLES, Kind, Sizes, UnprovedError, Value

FEATURES, DIM, STEPS = ("f", "g"), 4, 3
SIZES_K = (2, 5, 4)


@dataclass
class _Variable:
    """A tensor without data, and with: of the batch and of its parts."""

    fake: Tensor
    whole: Tensor
    parts_K: list[Tensor]
    words: str


class Program:
    """Calls on a batch and constants, as many as were asked for.

    Args:
        seed: Draws data and calls.
    """

    def __init__(self, seed: int) -> None:
        self._draw = Random(seed)
        torch.manual_seed(seed)
        self._sizes = Sizes()
        self._follower = Follower(self._sizes, {})
        self._variables: list[_Variable] = []
        self.num_calls = 0
        batch = self._batch()
        self._parts = split_batch(batch, SIZES_K)
        kjts = [batch["ids"], *(part["ids"] for part in self._parts)]
        self._rows_K = {SAMPLES: list(SIZES_K)}
        for place, feature in enumerate(FEATURES):
            counts = [kjt.length_per_key()[place] for kjt in kjts]
            self._rows_K[f"batch['ids'][{feature!r}]"] = counts[1:]
        totals = (kjt.values().size(0) for kjt in kjts[1:])
        self._rows_K["all of batch['ids']"] = list(totals)
        self._mode = FakeTensorMode(shape_env=self._sizes.env, allow_non_fake_inputs=True)
        inputs = Inputs(self._sizes, self._follower, self._mode, sum(SIZES_K))
        self._take_all(inputs.like(batch, "batch"), batch)

    def _batch(self) -> dict[str, Any]:
        num_samples = sum(SIZES_K)
        lengths, counts = torch.zeros(0, dtype=torch.int64), torch.tensor([num_samples])
        while num_samples in counts:  # as many lookups as samples are none of their parts'
            lengths = torch.randint(0, 3, (len(FEATURES) * num_samples,))
            counts = lengths.view(len(FEATURES), -1).sum(1)
        values = torch.randint(0, 4, (int(lengths.sum()),))
        return {
            "x": torch.randn(num_samples, DIM),
            "steps": torch.randn(num_samples, STEPS, DIM),
            "y": torch.rand(num_samples),
            "class": torch.randint(0, 2, (num_samples,)),
            "ids": KeyedJaggedTensor(list(FEATURES), values, lengths=lengths),
        }

    def _take_all(self, fake: Any, batch: Any) -> None:
        realms = [fake, batch, *self._parts]
        for name in ("x", "steps", "y", "class"):
            self._add([realm[name].clone() for realm in realms], name)
        with self._following():
            fakes = [of["ids"].to_dict() for of in realms[:1]]
        jagged = [*fakes, *(of["ids"].to_dict() for of in realms[1:])]
        for feature in FEATURES:
            self._add([of[feature].lengths() for of in jagged], f"lengths {feature}")
            self._add([of[feature].values() for of in jagged], f"ids {feature}")
        self._add([of["ids"].lengths() for of in realms], "lengths")
        self._add([of["ids"].values() for of in realms], "ids")
        constants = {
            "matrix": torch.randn(DIM, DIM),
            "vector": torch.randn(DIM),
            "number": torch.randn(()),
            "one": torch.randn(1),
            "column": torch.randn(DIM, 1),
            "kernel": torch.randn(2, STEPS, 2),
        }
        for name, value in constants.items():
            self._add([value] * len(realms), name)

    @contextmanager
    def _following(self) -> Iterator[None]:
        with torch.enable_grad(), enable_python_dispatcher(), self._mode, self._follower:
            yield

    def _add(self, realms: Sequence[Tensor], words: str) -> None:
        fake, whole, *parts_K = realms
        self._variables.append(_Variable(fake, whole, parts_K, words))

    def call(self) -> str | None:
        """One more call.

        Returns:
            What is wrong with the rules; ``None`` = nothing that shows.
        """
        draw = self._draw
        makes, num = draw.choices([(ONE, 1), (TWO, 2), (WRITING, 2)], [5, 5, 1])[0]
        given = [draw.choice(self._variables) for _ in range(num)]
        call = draw.choice(makes)(draw, [of.fake for of in given])
        words = f"{call.__name__} of ({', '.join(of.words for of in given)})"
        try:
            call(*(of.whole.clone() for of in given))
        except Exception:
            return None  # nothing that one can do
        sizes = self._sizes
        guards, wanted = len(sizes.env.guards), len(sizes._wanted)
        facts = self._facts(given)
        try:
            with self._following():
                fake = call(*(of.fake for of in given))
                self._follower.value_of(fake)
            is_known = not (sizes.assumption() or sizes.complaint())
        except Exception:
            is_known, self._follower.reason = False, None
        if not is_known:  # or holds where other calls ensure it only
            del sizes.env.guards[guards:], sizes._wanted[wanted:]
            if facts != self._facts(given):
                raise _EndOfProgramError
            return None
        try:
            whole = call(*(of.whole for of in given))
        except Exception:
            raise _EndOfProgramError from None  # it writes where memory overlaps
        try:
            parts_K = [call(*(of.parts_K[k] for of in given)) for k in range(len(SIZES_K))]
        except Exception as error:
            return f"{words} fails on a part: {error}"
        self.num_calls += 1
        self._add([fake, whole, *parts_K], words)
        if makes is WRITING:
            found = [self._check(of) for of in self._variables]
            return next((f"{words} leaves {of}" for of in found if of), None)
        found = self._check(self._variables[-1])
        if whole.numel() > 2000:
            self._variables.pop()
        return found

    def _facts(self, given: Sequence[_Variable]) -> Any:
        """What a call that is refused may have changed all the same."""
        sizes, shapes = self._sizes, [str(of.fake.shape) for of in given]
        return shapes, len(sizes.env.replacements), len(sizes._same_as)

    def _check(self, of: _Variable) -> str | None:
        try:
            value = self._follower.value_of(of.fake)
        except UnprovedError:
            return None
        expected = self._joined(of, value)
        if expected is None or _are_close(expected, of.whole):
            return None
        return f"{of.words}: {value}, but whole {of.whole} and joined {expected}"

    def _joined(self, of: _Variable, value: Value) -> Tensor | None:
        """The whole's entries as its parts give them."""
        if value.kind is Kind.SAME:
            return next((p for p in of.parts_K if not _are_close(p, of.whole)), of.whole)
        if value.kind is Kind.SUM:
            return torch.stack([part.double() for part in of.parts_K]).sum(0)
        if value.kind is Kind.MEAN:
            terms = [part * n / sum(SIZES_K) for part, n in zip(of.parts_K, SIZES_K)]
            return torch.stack(terms).sum(0)
        if value.kind is not Kind.ROWS:
            return None
        parts, rows_K = [], self._rows_K[value.rows]
        starts = [0] * len(rows_K)
        if value.counted:
            counts = self._rows_K[value.counted]
            starts = [sum(counts[:k]) for k in range(len(counts))]
        for part, rows, start in zip(of.parts_K, rows_K, starts):
            inner = self._sizes.inner(of.fake, value)
            if part.shape[value.dim] != value.outer * rows * inner:
                return torch.full((), torch.nan)
            found = part.unflatten(value.dim, (value.outer, rows, inner))
            parts.append(found + start if value.counted else found)
        joined = torch.cat(parts, value.dim + 1)
        return joined.flatten(value.dim, value.dim + 2)


class _EndOfProgramError(Exception):
    """A program that says nothing from here on."""


def run_programs(seeds: Sequence[int], num_calls: int = 60) -> tuple[int, list[str]]:
    """Runs programs.

    Args:
        seeds: One for each.
        num_calls: Calls that are tried in each.

    Returns:
        Calls that the rules understood, and what is wrong with them.
    """
    total, wrong = 0, []
    logging.disable(logging.CRITICAL)  # PyTorch logs calls that fail without data
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in seeds:
                program = Program(seed)
                found = _first_wrong(program, num_calls)
                total += program.num_calls
                if found is not None:
                    wrong.append(f"seed {seed}: {found}")
    finally:
        logging.disable(logging.NOTSET)
    return total, wrong


def _first_wrong(program: Program, num_calls: int) -> str | None:
    try:
        return next((found for _ in range(num_calls) if (found := program.call())), None)
    except _EndOfProgramError:
        return None


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-4, equal_nan=True)


if __name__ == "__main__":  # python -m tests.proof.random_calls 1000
    print(*run_programs(range(int(sys.argv[1]))), sep="\n")
