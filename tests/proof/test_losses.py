"""Losses and what is computed along the batch: which are proved, and what is said of the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torchrec import JaggedTensor
from torchrec.datasets.utils import Batch

from tests.proof import models

Loss = Callable[[models.Head, Tensor, Batch], Tensor]


def _two(logits: Tensor) -> Tensor:
    return torch.stack([logits, -logits], dim=1)


def _clicked(batch: Batch) -> Tensor:
    return (batch.labels > 0.5).long()


def _by_kept_mean(head: models.Head, logits: Tensor, batch: Batch) -> Tensor:
    kept = torch.zeros(2)
    kept[:1].copy_(logits.mean())
    return (logits * kept[0]).mean()


def _two_features(batch: Batch) -> JaggedTensor:
    f, g = (batch.sparse_features[name] for name in ("f", "g"))
    return JaggedTensor(f.values().float(), lengths=g.lengths())


def _looked_up(logits: Tensor, batch: Batch, shaped: Callable[[Tensor], Tensor]) -> Tensor:
    """Adds ids of a feature, in a column."""
    ids_N = batch.sparse_features["f"].values()
    columns_N1 = shaped(ids_N).view(ids_N.shape[0], -1)
    return logits.mean() + columns_N1.sum() / logits.shape[0]


def _per_lookup(head: models.Head, logits: Tensor, batch: Batch) -> Tensor:
    """The sum over a feature's lookups of what its sample has, by the number of samples."""
    ids = batch.sparse_features["f"]
    places = torch.arange(logits.shape[0])
    sample_N = torch.repeat_interleave(places, ids.lengths(), output_size=ids.values().shape[0])
    rows_N = torch.sin(logits.index_select(0, sample_N) * ids.values())
    sums_B = torch.zeros_like(logits).index_add(0, sample_N, rows_N)
    return sums_B.mean() + rows_N.sum() / logits.shape[0]


PROVED: dict[str, Loss] = {
    "mean": lambda head, out, batch: ((out - batch.labels) ** 2).mean(),
    "sum by samples": lambda head, out, batch: (out - batch.labels).abs().sum() / out.shape[0],
    "sum by numel": lambda head, out, batch: (out * batch.labels).sum() / out.numel(),
    "weights": lambda head, out, batch: out.mean() + 0.1 * head.hidden.weight.square().sum(),
    "entropy": lambda head, out, batch: functional.binary_cross_entropy_with_logits(
        out, batch.labels, weight=2 * batch.labels, pos_weight=torch.tensor(2.0)
    ),
    "probabilities": lambda head, out, batch: functional.binary_cross_entropy(
        out.sigmoid(), batch.labels
    ),
    "errors": lambda head, out, batch: (
        functional.huber_loss(out, batch.labels)
        + 0.5 * functional.smooth_l1_loss(out, batch.labels)
        - functional.l1_loss(out, batch.labels)
        + functional.mse_loss(out, batch.labels)
    ),
    "classes": lambda head, out, batch: functional.cross_entropy(
        _two(out), _clicked(batch), reduction="none"
    ).mean(),
    "mean of means": lambda head, out, batch: torch.stack([out.mean(), (2 * out).mean()]).mean(),
    "several": lambda head, out, batch: _two(out).mean(dim=0),
    "own place": lambda head, out, batch: _two(out)[
        torch.arange(out.shape[0]), _clicked(batch)
    ].mean(),
    "own place, repeated": lambda head, out, batch: out[
        torch.arange(out.shape[0]).repeat(3, 1)
    ].mean(),
    "gather": lambda head, out, batch: _two(out).gather(1, _clicked(batch)[:, None]).mean(),
    "where": lambda head, out, batch: torch.where(batch.labels > 0.5, out, -out).mean(),
    "masked": lambda head, out, batch: out.masked_fill(batch.labels > 0.5, 0.0).mean(),
    "in place": lambda head, out, batch: out.clone().mul_(2).add_(batch.labels).mean(),
    "lengths": lambda head, out, batch: (
        out / batch.sparse_features["f"].lengths().float().clamp(min=1)
    ).mean(),
    "padded": lambda head, out, batch: (
        out * batch.sparse_features.to_dict()["g"].to_padded_dense(5).float().sum(dim=1)
    ).mean(),
    "per lookup": _per_lookup,
}


def _recorded(head: models.Head, out: Tensor, batch: Batch) -> Tensor:
    with torch.profiler.record_function("loss"):
        return out.mean()


PROVED["recorded"] = _recorded

SHARED_REASONS: dict[str, dict[str, Loss]] = {
    "ratio of two sums": {
        "mean over clicked": lambda head, out, batch: (
            (out * batch.labels).sum() / batch.labels.sum()
        ),
        "mean over targets": lambda head, out, batch: functional.cross_entropy(
            _two(out), _clicked(batch)
        ),
    },
    "over the batch": {
        "padded to the longest": lambda head, out, batch: (
            out.mean() * batch.sparse_features.to_dict()["f"].to_padded_dense().float().mean()
        ),
        "deviation": lambda head, out, batch: out.std(),
        "largest": lambda head, out, batch: out.max(),
        "cumsum": lambda head, out, batch: out.cumsum(0).mean(),
        "sorted": lambda head, out, batch: (out.sort()[0] - batch.labels).mean(),
        "softmax": lambda head, out, batch: out.softmax(0).square().mean(),
        "normalized": lambda head, out, batch: functional.normalize(out, dim=0).mean(),
        "rolled": lambda head, out, batch: (out.roll(1) * batch.labels).mean(),
        "flipped": lambda head, out, batch: (out.flip(0) * batch.labels).mean(),
        "first": lambda head, out, batch: out[0],
    },
    "not linear": {
        "balance": lambda head, out, batch: out.mean() + _two(out).softmax(1).sum(0).var(),
        "product of means": lambda head, out, batch: out.mean() * batch.labels.mean(),
        "root of a mean": lambda head, out, batch: (out**2).mean().sqrt(),
    },
    "places in the batch": {
        "neighbour": lambda head, out, batch: out[torch.arange(out.shape[0]) - 1].mean(),
        "by place": lambda head, out, batch: (out * torch.arange(out.shape[0])).mean(),
    },
    "different orders": {
        "places in another order": lambda head, out, batch: out[
            torch.arange(out.shape[0]).repeat(3, 1).view(-1)
        ].mean(),
        "added to places in another order": lambda head, out, batch: (
            torch.zeros_like(out).index_add(
                0, torch.arange(out.shape[0]).repeat(2, 1).view(-1), _two(out).view(-1)
            )
        ).mean(),
    },
    "leaves others": {
        "shifted": lambda head, out, batch: (
            _two(out).view(-1)[1:].mean() + _two(out).view(-1).roll(1).view(-1, 2).mean()
        ),
        "every other": lambda head, out, batch: out[::2].mean(),
    },
    "branches": {
        "at least one": lambda head, out, batch: out.sum() / max(1, out.shape[0]),
        "threshold": lambda head, out, batch: out.mean() if out.shape[0] > 100 else 2 * out.mean(),
        "one sample": lambda head, out, batch: out.mean() if out.shape[0] == 1 else 2 * out.mean(),
    },
    "infers a size from lookups, which may be none": {
        "another shape": lambda head, out, batch: _looked_up(out, batch, lambda ids_N: ids_N),
        "the same shape": lambda head, out, batch: _looked_up(
            out, batch, lambda ids_N: ids_N[:, None]
        ),
    },
    "random numbers": {
        "noise": lambda head, out, batch: (out + torch.randn_like(out)).mean(),
        "gate": lambda head, out, batch: out.mean() * (torch.rand(()) < 0.4),
    },
}
UNPROVED: dict[str, tuple[Loss, str]] = {
    **{name: (loss, words) for words, one in SHARED_REASONS.items() for name, loss in one.items()},
    "in-batch softmax": (
        lambda head, out, batch: functional.cross_entropy(
            out[:, None] * out[None, :], torch.arange(out.shape[0])
        ),
        "every other sample",
    ),
    "clicked samples": (lambda head, out, batch: out[batch.labels > 0.5].mean(), "without data"),
    "mean over lookups": (
        lambda head, out, batch: out.mean() + batch.sparse_features["f"].values().float().mean(),
        "averages over lookups",
    ),
    "pairs": (
        lambda head, out, batch: functional.softplus(
            out.view(-1, 2)[:, 0] - out.view(-1, 2)[:, 1]
        ).mean(),
        "Mod(samples, 2)",
    ),
    "sessions": (
        lambda head, out, batch: out.mean() + batch.labels.unique(return_inverse=True)[1].max(),
        "no rule",
    ),
    "centered": (lambda head, out, batch: ((out - out.mean()) ** 2).mean(), "combines"),
    "indexed": (lambda head, out, batch: out[_clicked(batch)].mean(), "other samples"),
    "turned": (
        lambda head, out, batch: _two(out).t().reshape(-1, 2)[:, 0].mean(),
        "different samples",
    ),
    "half": (lambda head, out, batch: out[: out.shape[0] // 2].mean(), "size of the batch"),
    "broadcast": (lambda head, out, batch: (out[:, None] - batch.labels).mean(), "every other"),
    "by constant": (
        lambda head, out, batch: (out * torch.linspace(0, 1, out.shape[0])).mean(),
        "different constants",
    ),
    "cut table": (lambda head, out, batch: (out + torch.zeros(64)[: out.shape[0]]).mean(), "64"),
    "sum": (lambda head, out, batch: (out**2).sum(), "the loss is a sum"),
    "detached sum": (
        lambda head, out, batch: out.mean() + out.sum() - out.sum().detach(),
        "adds a sum",
    ),
    "by B squared": (
        lambda head, out, batch: out.sum() / (out.shape[0] * out.shape[0]),
        "another number",
    ),
    "times B": (lambda head, out, batch: out.mean() * out.shape[0], "size as a number"),
    "len": (lambda head, out, batch: out.sum() / len(out), "len()"),
    "iterated": (lambda head, out, batch: sum(out.unbind()) / out.shape[0], "Eq(samples"),
    "item": (lambda head, out, batch: out.mean() * out.detach()[:, None].amax(1).item(), "data"),
    "data": (lambda head, out, batch: (out - out.data).mean(), "use detach()"),
    "no graph": (lambda head, out, batch: out.detach().mean(), "no graph"),
    "written labels": (lambda head, out, batch: (out - batch.labels.mul_(2)).mean(), "the batch"),
    "written weights": (
        lambda head, out, batch: (out * head.over.weight.detach().view(-1)[:1].mul_(0.9)).mean(),
        "writes into head.over.weight",
    ),
    "number of a tensor": (
        lambda head, out, batch: _two(out)[:, torch.tensor(1)].mean(),
        "gives a number that depends on data",
    ),
    "mean in a view": (_by_kept_mean, "writes a mean over samples into a view of what is the same"),
    "lengths of another feature": (
        lambda head, out, batch: out.mean() + _two_features(batch).to_padded_dense(3).mean(),
        "for equally many, which they may not be",
    ),
    "permuted": (lambda head, out, batch: out[torch.randperm(out.shape[0])].mean(), "random"),
    "dropped weights": (
        lambda head, out, batch: out.mean() + functional.dropout(head.hidden.weight).sum(),
        "samples share",
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_proved(name: str) -> None:
    head = models.with_loss(PROVED[name])()
    assert models.prove_head(head).reason is None
    batch = models.make_batch()
    model = models.Model(head)
    given = models.given_tables(model, batch.sparse_features)
    models.assert_cut_is_whole(model, batch, given, [1, 6, 5], "mean")


@pytest.mark.parametrize("name", UNPROVED)
def test_unproved(name: str) -> None:
    loss, words = UNPROVED[name]
    reason = models.prove_head(models.with_loss(loss)()).reason
    assert words in reason


def test_dropout_may_draw() -> None:
    head = models.with_loss(lambda head, out, batch: functional.dropout(out).mean())()
    assert models.prove_head(head).reason is None


def test_sums() -> None:
    loss = models.with_loss(lambda head, out, batch: (out * batch.labels).sum())
    assert models.prove_head(loss(), losses="sum").reason is None
    assert "not a sum" in str(models.prove_head(models.Head(), losses="sum").reason)


def test_ratios() -> None:
    def ratio(head: models.Head, out: Tensor, batch: Batch) -> Any:
        return (out * batch.labels).sum(), batch.labels.sum()

    def mean_loss(head: models.Head, out: Tensor, batch: Batch) -> Any:
        return (out * batch.labels).sum(), batch.labels.mean()

    assert models.prove_head(models.with_loss(ratio)(), losses="ratio").reason is None
    assert "not a sum" in str(
        models.prove_head(models.with_loss(mean_loss)(), losses="ratio").reason
    )
    assert "not two sums" in str(models.prove_head(models.Head(), losses="ratio").reason)


def test_a_reason_names_the_line() -> None:
    loss, _ = UNPROVED["cumsum"]
    reason = models.prove_head(models.with_loss(loss)()).reason
    assert f"{__file__}:{loss.__code__.co_firstlineno}" in str(reason)
