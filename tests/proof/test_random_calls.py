"""Random calls of PyTorch, each beside what the rules say of its result; a wrong rule is found.

A program of calls grows on tensors without data, followed by the rules; a call that they do not
understand is left out. The others run with data too, on a whole batch and on its parts, and every
result must lie along the batch as the rules say. Calls are of one tensor, of two, or write.
"""

import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.proof import call as rules
from torchrec_picasso.proof.follow import Follower
from torchrec_picasso.proof.inputs import Inputs
from torchrec_picasso.proof.values import SAMPLES, Kind, Sizes, UnprovedError, Value

Call = Callable[..., Any]
Make = Callable[[Random, Sequence[Tensor]], Call]
"""Draws a call for tensors without data; the same call then runs on all of them."""


def _dim(draw: Random, tensor: Tensor) -> int:
    return draw.randrange(-tensor.dim(), tensor.dim()) if tensor.dim() else 0


def _reshape(draw: Random, tensors: Sequence[Tensor]) -> Call:
    (tensor,) = tensors
    d, k, way = _dim(draw, tensor), draw.choice((2, 3, 4)), draw.randrange(8)
    e = _dim(draw, tensor)
    low, high = sorted((d % max(tensor.dim(), 1), e % max(tensor.dim(), 1)))
    return (
        lambda a: a.reshape(-1),
        lambda a: a.reshape(-1, k),
        lambda a: a.reshape(k, -1),
        lambda a: a.reshape(a.shape[d], -1),
        lambda a: a.reshape(-1, a.shape[d]),
        lambda a: a.flatten(low, high),
        lambda a: a.unflatten(d, (-1, k)),
        lambda a: a.unflatten(d, (k, -1)),
    )[way]


def _with_dim(*calls: Callable[[Tensor, int], Any]) -> Make:
    def make(draw: Random, tensors: Sequence[Tensor]) -> Call:
        call, d = draw.choice(calls), _dim(draw, tensors[0])
        return wraps(call)(lambda *given: call(*given, d))

    return make


def _with_dims(*calls: Callable[[Tensor, int, int], Any]) -> Make:
    def make(draw: Random, tensors: Sequence[Tensor]) -> Call:
        call, d, e = draw.choice(calls), _dim(draw, tensors[0]), _dim(draw, tensors[0])
        return wraps(call)(lambda a: call(a, d, e))

    return make


def _any_of(*calls: Call) -> Make:
    return lambda draw, tensors: draw.choice(calls)


def _named(module: Any, names: str) -> list[Call]:
    """Functions of a module, by their names."""
    return [getattr(module, name) for name in names.split()]


def _methods(names: str) -> list[Call]:
    """Methods of the first tensor, which get what else is given."""
    return [getattr(Tensor, name) for name in names.split()]


def _calls(arguments: str, text: str) -> list[Call]:
    """Functions of these arguments; what each gives is a line of the text, or a part of one."""
    found = []
    for line in filter(None, map(str.strip, re.split("[;\n]", text))):
        found.append(eval(f"lambda {arguments}: {line}"))
        found[-1].__name__ = line
    return found


def _own_places(a: Tensor, d: int) -> Tensor:
    return torch.arange(a.shape[d])


ONE: list[Make] = [
    _reshape,
    _reshape,
    _any_of(
        *_named(torch, "tanh sigmoid relu neg abs"),
        *_named(functional, "gelu logsigmoid softplus"),
        *_methods("clone contiguous detach long int"),
        *_calls(
            "a",
            """
            1 - a; 2 * a + 1; a / 3; a.clamp(-1, 1); a.float().double(); a > 0;
            a.masked_fill(a > 0.5, 0.0); torch.where(a > 0, a, 0.0); a.nan_to_num();
            torch.zeros_like(a); torch.ones_like(a).cumsum(-1); a.new_zeros(a.shape[0], 3);
            a.new_ones(a.shape); a.view(torch.int64); a.view(torch.float32)
            """,
        ),
    ),
    _any_of(
        *_named(torch, "sum mean amax std cov trace combinations"),
        *_methods("norm tril squeeze argsort"),
        *_calls(
            "a",
            """
            a.sum() / a.shape[0]; a.sum() / a.shape[-1]; a.sum() / a.numel(); a.sum(0) / a.shape[0];
            a.sum() / (2 * a.shape[0]); a.norm(dim=-1);
            torch.linalg.vector_norm(a, dim=-1, keepdim=True); functional.normalize(a, dim=-1);
            functional.normalize(a, dim=0); functional.layer_norm(a, a.shape[1:]);
            functional.rms_norm(a, a.shape[-1:]); functional.group_norm(a, 2);
            functional.instance_norm(a); functional.avg_pool1d(a, 2); functional.max_pool1d(a, 2);
            functional.max_pool2d(a, 2); functional.adaptive_avg_pool1d(a, 2);
            functional.interpolate(a, scale_factor=2); functional.pad(a, (1, 0));
            functional.pad(a, (0, 0, 1, 0)); functional.local_response_norm(a, 2);
            torch.cdist(a, a); a.T if a.dim() == 2 else a; a @ a.mT; a.mT @ a;
            torch.einsum("ij,ik->ijk", a, a); torch.einsum("ij,kj->ik", a, a);
            torch.einsum("bij,bkj->bik", a, a); torch.einsum("bij,bik->jk", a, a);
            a[:, None] * a[None, :]; a[:, None] - a[:, :, None]; a[..., None, :]; a[:, 0]; a[0];
            a[:, :2]; a[1:]; a[: a.shape[0]]; a[::2]; a[a > 0]; a[torch.arange(a.shape[0])];
            a[torch.arange(a.shape[0]), 0];
            a[torch.arange(a.shape[0])[:, None], torch.tensor([1, 0])]; a[:, torch.tensor([1, 0])];
            a[torch.tensor([1, 0])]; a.triu(1); a.diagonal(dim1=-2, dim2=-1); torch.diag_embed(a);
            torch.block_diag(a, a); a.squeeze(-1); a.repeat(2, 1); a.repeat(1, 2); a.tile(2);
            torch.stack([a.mean(), a.sum() / a.shape[0]]); a.mean().expand(3); a.mean(0).repeat(2);
            torch.outer(a, a); torch.kron(a, a); torch.cartesian_prod(a, a);
            torch.renorm(a, 2, 0, 1.0); functional.one_hot(a.long().clamp(0, 3), 4);
            functional.kl_div(a.log_softmax(-1), a.softmax(-1), reduction="batchmean");
            functional.unfold(a, 2); torch.bucketize(a, torch.tensor([-1.0, 0.0, 1.0]));
            torch.isin(a, torch.tensor([0, 1, 2])); a.topk(2).values; a.topk(2).indices;
            a.sort(descending=True).indices; a.gather(-1, a.argsort(-1)); functional.glu(a);
            torch.view_as_complex(a.unflatten(-1, (-1, 2))).abs(); torch.fft.rfft(a).abs();
            a.repeat_interleave(2, dim=0); a.repeat_interleave(2, dim=-1); torch.rot90(a);
            torch.meshgrid(a, a, indexing="ij")[0];
            functional.scaled_dot_product_attention(a, a, a);
            functional.scaled_dot_product_attention(a[:, None], a[:, None], a[:, None]);
            functional.scaled_dot_product_attention(a, a, a, is_causal=True);
            functional.pixel_shuffle(a[..., None, None], 2)
            """,
        ),
    ),
    _with_dim(
        *_methods("sum mean softmax log_softmax cumsum amax flip unsqueeze squeeze cumprod"),
        *_named(functional, "softmin"),
        *_calls(
            "a, d",
            """
            a.mean(d, keepdim=True); a.sum(d) / a.shape[d]; a.max(d).values; a.max(d).indices;
            a.argmin(d, keepdim=True); a.sort(d).values; a.roll(1, d); a.select(d, 0);
            a.select(d, -1); a.narrow(d, 0, 1); a.narrow(d, 0, a.shape[d]); a.unfold(d, 2, 1);
            a.chunk(2, d)[0]; a.unbind(d)[0]; a.split(2, d)[0]; torch.stack([a, 2 * a], d);
            torch.cat([a, 2 * a], d)
            """,
        ),
        *_named(torch, "logsumexp var"),
        *_calls(
            "a, d",
            """
            torch.diff(a, dim=d); torch.nn.functional.gumbel_softmax(a.new_zeros(3), dim=0);
            a.index_select(d, torch.tensor([1, 0])); a.index_select(d, _own_places(a, d));
            a.expand(3, *a.shape); a.new_zeros(a.shape[d]); _own_places(a, d);
            torch.full((a.shape[d], 2), 3.0); a.median(d).values; torch.renorm(a, 2, d, 1.0);
            functional.normalize(a, dim=d); a.repeat_interleave(2, dim=d);
            torch.zeros_like(a).scatter(d, a.long().clamp(0, 1), 1.0);
            torch.zeros_like(a).scatter_add(d, a.long().clamp(0, 1), a);
            torch.zeros_like(a).index_add(d, _own_places(a, d), a);
            torch.take_along_dim(a, a.argsort(d), d); a.index_fill(d, torch.tensor([0]), 1.0);
            a.movedim(d, 0); a.tensor_split(2, d)[0]
            """,
        ),
    ),
    _with_dims(
        *_methods("transpose movedim flip"),
        *_calls(
            "a, d, e",
            """
            a.diagonal(0, d, e); a.sum((d, e)); a.mean((d, e)); a.transpose(d, e).reshape(a.shape);
            a.transpose(d, e).flatten(); a.transpose(d, e).reshape(-1, a.shape[d]);
            torch.tensordot(a, a, dims=([d], [e]))
            """,
        ),
    ),
]

TWO: list[Make] = [
    _any_of(
        *_named(operator, "add sub mul truediv matmul"),
        *_named(torch, "maximum ge eq clamp fmod hypot xlogy outer bmm mv dot cdist addcmul"),
        *_named(functional, "linear mse_loss l1_loss huber_loss smooth_l1_loss soft_margin_loss"),
        *_named(functional, "prelu pairwise_distance cosine_similarity poisson_nll_loss conv1d"),
        *_named(functional, "pdist bilinear"),
        *_calls(
            "a, b",
            """
            torch.where(a > 0, a, b); functional.binary_cross_entropy_with_logits(a, b.sigmoid());
            functional.binary_cross_entropy_with_logits(a, a.sigmoid(), weight=b.sigmoid());
            functional.binary_cross_entropy_with_logits(a, a.sigmoid(), pos_weight=b.sigmoid());
            functional.cross_entropy(a, b.long().clamp(0, 1), reduction="none");
            functional.cross_entropy(a, b.long().clamp(0, 1), reduction="sum");
            functional.cross_entropy(a, b.long().clamp(0, 1), label_smoothing=0.1);
            functional.cross_entropy(a, b.softmax(-1)); functional.mse_loss(a, b, reduction="sum");
            functional.mse_loss(a, b, reduction="none");
            functional.embedding(a.long().clamp(0, 1), b); b[a.long().clamp(0, 1)];
            b[:, a.long().clamp(0, 1)]; b[torch.arange(b.shape[0]), a.long().clamp(0, 1)];
            a.scatter(1, b.long().clamp(0, 1), 1.0); a.gather(1, b.long().clamp(0, 1));
            a.repeat_interleave(b, dim=0); a.index_add(0, torch.arange(b.shape[0]), b);
            torch.einsum("bi,bj->bij", a, b); torch.einsum("bi,bi->b", a, b);
            torch.einsum("bi,bi->i", a, b); torch.einsum("bi,ij->bj", a, b);
            torch.addmm(b, a, a.new_ones(a.shape[-1], 3)); torch.baddbmm(a, b, b.mT);
            a.expand_as(b); a.view_as(b); torch.lerp(a, b, 0.3);
            functional.triplet_margin_loss(a, b, -a);
            functional.margin_ranking_loss(a, b, torch.sign(a));
            functional.layer_norm(a, b.shape, b); torch.searchsorted(a, b);
            (a - b.mean()).square().mean(); a.mean() * b + a.mean(); (a * b).sum() / a.shape[0];
            (a.sum(-1) * b).mean(); a.index_put((torch.arange(a.shape[0]),), b);
            a.masked_scatter(a > 0, b); a.slice_scatter(b, 0); a.select_scatter(b, 1, 0);
            functional.cosine_embedding_loss(a, b, torch.ones(()))
            """,
        ),
    ),
    _with_dim(
        *_calls(
            "a, b, d",
            """
            torch.cat([a, b], d); torch.stack([a, b], d); a.index_select(d, b);
            a.gather(d, b.long().clamp(0, 1)); a.index_add(d, b, a)
            """,
        )
    ),
]


def _written(write: Callable[..., Any]) -> Call:
    @wraps(write)
    def call(*tensors: Tensor) -> Tensor:
        write(*tensors)
        return tensors[0]

    return call


WRITING: list[Make] = [
    _any_of(
        *map(
            _written,
            _calls(
                "a, b",
                """
                a.add_(b); a.mul_(b); a.copy_(b); a.zero_(); a[:, 0].copy_(b); a[:, :1].fill_(1.0);
                a[0].zero_(); a.view(-1).add_(b.reshape(-1)); a.T.mul_(b);
                a.masked_fill_(b > 0, 0.0); a.__setitem__(slice(None, 1), 0.0);
                a.__setitem__((slice(None), 0), b); a.index_add_(0, torch.arange(b.shape[0]), b);
                a.scatter_(1, b.long().clamp(0, 1), 1.0); a.t_(); a.unsqueeze_(0);
                torch._foreach_add_([a], [b])
                """,
            ),
        )
    )
]


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
    """Calls on a batch and constants, as many as were asked for."""

    def __init__(self, seed: int, makes_inputs: bool) -> None:
        self._draw = Random(seed)
        torch.manual_seed(seed)
        self._sizes = Sizes()
        self._follower = Follower(self._sizes, {}, makes_inputs)
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
        inputs = Inputs(self._follower, self._mode, sum(SIZES_K))
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
            fakes = [each["ids"].to_dict() for each in realms[:1]]
        jagged = [*fakes, *(each["ids"].to_dict() for each in realms[1:])]
        for feature in FEATURES:
            self._add([each[feature].lengths() for each in jagged], f"lengths {feature}")
            self._add([each[feature].values() for each in jagged], f"ids {feature}")
        self._add([each["ids"].lengths() for each in realms], "lengths")
        self._add([each["ids"].values() for each in realms], "ids")
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
        """Returns what one more call shows to be wrong with the rules; ``None`` = nothing."""
        draw = self._draw
        makes, num = draw.choices([(ONE, 1), (TWO, 2), (WRITING, 2)], [5, 5, 1])[0]
        given = [draw.choice(self._variables) for _ in range(num)]
        call = draw.choice(makes)(draw, [each.fake for each in given])
        words = f"{call.__name__} of ({', '.join(each.words for each in given)})"
        try:
            call(*(each.whole.clone() for each in given))
        except Exception:
            return None  # nothing that one can do
        sizes = self._sizes
        guards, wanted = len(sizes.env.guards), len(sizes._wanted)
        facts = self._facts(given)
        try:
            with self._following():
                fake = call(*(each.fake for each in given))
                self._follower.value_of(fake)
            is_known = not (sizes.assumption() or sizes.refusal())
        except Exception:
            is_known, self._follower.reason = False, None
        if not is_known:  # or holds where other calls ensure it only
            del sizes.env.guards[guards:], sizes._wanted[wanted:]
            if facts != self._facts(given):
                raise _EndOfProgramError
            return None
        try:
            whole = call(*(each.whole for each in given))
        except Exception:
            raise _EndOfProgramError from None  # it writes where memory overlaps
        try:
            parts_K = [call(*(each.parts_K[k] for each in given)) for k in range(len(SIZES_K))]
        except Exception as error:
            if self._follower.value_of(fake).kind is Kind.INPUT:
                return None  # what tables get is made of all parts before one is trained
            return f"{words} fails on a part: {error}"
        self.num_calls += 1
        self._add([fake, whole, *parts_K], words)
        if makes is WRITING:
            found = [self._check(each) for each in self._variables]
            return next((f"{words} leaves {each}" for each in found if each), None)
        found = self._check(self._variables[-1])
        if whole.numel() > 2000:
            self._variables.pop()
        return found

    def _facts(self, given: Sequence[_Variable]) -> Any:
        """Returns what a call that is refused may have changed all the same."""
        sizes, shapes = self._sizes, [str(each.fake.shape) for each in given]
        return shapes, len(sizes.env.replacements), len(sizes._same_as)

    def _check(self, variable: _Variable) -> str | None:
        try:
            value = self._follower.value_of(variable.fake)
        except UnprovedError:
            return None
        expected = self._joined(variable, value)
        if expected is None or _are_close(expected, variable.whole):
            return None
        return f"{variable.words}: {value}, but whole {variable.whole} and joined {expected}"

    def _joined(self, variable: _Variable, value: Value) -> Tensor | None:
        """The whole's entries as its parts give them."""
        if value.kind is Kind.SAME:
            return next(
                (p for p in variable.parts_K if not _are_close(p, variable.whole)), variable.whole
            )
        if value.kind is Kind.SUM:
            return torch.stack([part.double() for part in variable.parts_K]).sum(0)
        if value.kind is Kind.MEAN:
            terms = [part * n / sum(SIZES_K) for part, n in zip(variable.parts_K, SIZES_K)]
            return torch.stack(terms).sum(0)
        if value.kind is not Kind.ROWS:
            return None
        parts, rows_K = [], self._rows_K[value.rows]
        starts = [0] * len(rows_K)
        if value.counted:
            counts = self._rows_K[value.counted]
            starts = [sum(counts[:k]) for k in range(len(counts))]
        for part, rows, start in zip(variable.parts_K, rows_K, starts):
            inner = self._sizes.inner(variable.fake, value)
            if part.shape[value.dim] != value.outer * rows * inner:
                return torch.full((), torch.nan)
            found = part.unflatten(value.dim, (value.outer, rows, inner))
            parts.append(found + start if value.counted else found)
        joined = torch.cat(parts, value.dim + 1)
        return joined.flatten(value.dim, value.dim + 2)


class _EndOfProgramError(Exception):
    """A program that says nothing from here on."""


def run_programs(
    seeds: Sequence[int], num_calls: int = 60, makes_inputs: bool = False
) -> tuple[int, list[str]]:
    """Calls of all programs that the rules understood, and what is wrong with them."""
    total, wrong = 0, []
    logging.disable(logging.CRITICAL)  # PyTorch logs calls that fail without data
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in seeds:
                program = Program(seed, makes_inputs)
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


NUM_PROGRAMS = 40


@pytest.mark.parametrize("makes_inputs", [False, True])
def test_rules_say_what_calls_do(makes_inputs: bool) -> None:
    num_calls, wrong = run_programs(range(NUM_PROGRAMS), makes_inputs=makes_inputs)
    assert wrong == []
    assert num_calls > 5 * NUM_PROGRAMS


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rules.RULES["sum"]

    def total(call: rules.Call) -> Value | None:
        (found,) = right(call) or [None]
        return Value(Kind.MEAN) if found is not None and found.kind is Kind.SUM else found

    monkeypatch.setitem(rules.RULES, "sum", replace(right, function=total))
    assert run_programs(range(NUM_PROGRAMS))[1]
