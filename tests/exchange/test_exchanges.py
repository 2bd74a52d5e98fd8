"""What arrives is what was sent: rows, headers, hot sums on 1-3 ranks, by plain indexing."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
)

from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.exchange.header import HeaderExchange, HeaderWords, RouteWords
from torchrec_picasso.exchange.hot_reduction import HotReduction
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.exchange.ranks import Ranks

NUM_CASES = 12


def _counts(case: int, num_packs: int, world_size: int) -> list[list[list[int]]]:
    """Rows from rank to rank and pack, the same on every rank; often none."""
    rng = random.Random(case)
    return [
        [[rng.choice((0, 1, 2, 5)) for _ in range(world_size)] for _ in range(num_packs)]
        for _ in range(world_size)
    ]


def _row(source: int, target: int, pack: int, i: int, dim: int) -> Tensor:
    return torch.arange(dim) + 1.0 + 8 * i + 64 * pack + 128 * target + 512 * source


def _rows(sources: list[int], targets: list[int], pack: int, counts: list[int], dim: int) -> Tensor:
    rows = [
        _row(source, target, pack, i, dim)
        for source, target, count in zip(sources, targets, counts)
        for i in range(count)
    ]
    return torch.stack(rows) if rows else torch.empty(0, dim)


def _all_to_all(rank: int, world_size: int) -> None:
    ranks = Ranks(dist.group.WORLD)
    # not the registry: on CPU it replaces BF16 by FP16
    codecs = get_qcomm_codecs(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    )
    wires = {
        torch.float32: None,
        torch.float16: codecs.forward,
        torch.bfloat16: codecs.backward,
    }
    everyone, me = list(range(world_size)), [rank] * world_size
    for case in range(NUM_CASES):
        dims = [(4,), (4, 8), (8, 4, 12)][case % 3]
        counts = _counts(case, len(dims), world_size)
        send_PW = counts[rank]
        receive_PW = [[counts[r][p][rank] for r in everyone] for p in range(len(dims))]
        inputs = [_rows(me, everyone, p, send_PW[p], dim) for p, dim in enumerate(dims)]
        expected = [_rows(everyone, me, p, receive_PW[p], dim) for p, dim in enumerate(dims)]
        for dtype, codec in wires.items():
            # outputs are slices of larger matrices, whose head must stay as it is
            whole = [torch.full((3 + e.size(0), e.size(1)), -1.0) for e in expected]
            outputs = [matrix[3:] for matrix in whole]
            exchange = PackedAllToAll(ranks, inputs, send_PW, outputs, receive_PW, codec)
            exchange.wait()
            for matrix, output, rows in zip(whole, outputs, expected):
                assert torch.equal(output, rows.to(dtype).float())
                assert (matrix[:3] == -1).all()
                output.fill_(-2.0)
            exchange.wait()  # packs that share it all wait; what is theirs by now stays
            assert all((output == -2.0).all() for output in outputs)
        ids = [rows[:, 0].to(torch.int32) for rows in inputs]
        arrived = [torch.empty(sum(c), dtype=torch.int32) for c in receive_PW]
        PackedAllToAll(ranks, ids, send_PW, arrived, receive_PW).wait()
        for output, rows in zip(arrived, expected):
            assert torch.equal(output, rows[:, 0].to(torch.int32))


def _headers(rank: int, world_size: int) -> None:
    for case in range(NUM_CASES):
        rng = random.Random(case)
        num_words = [[rng.choice((0, 1, 3)) for _ in range(2)] for _ in range(case % 3)]
        # by route and piece of the message, the words from rank to rank
        sent = [
            [torch.arange(world_size**2 * num).view(world_size, world_size, num) for num in nums]
            for nums in num_words
        ]
        kept = [torch.arange(5 * place) + 100 * rank for place in range(3)]
        bad_rank = rng.randrange(world_size)
        ranks_with_data = rng.sample(range(world_size), rng.randrange(world_size + 1))
        words = HeaderWords(
            routes=[RouteWords([piece[rank] for piece in pieces], kept) for pieces in sent],
            outside_ids=torch.tensor(5 if rank == bad_rank else 0),
            bad_weights=torch.tensor(rank),
            bad_lengths=(rank == bad_rank, torch.tensor(rank == bad_rank))[case % 2],
            has_data=rank in ranks_with_data,
        )
        header = HeaderExchange(Ranks(dist.group.WORLD), words).wait()
        for pieces, route in zip(sent, header.routes, strict=True):
            for piece, received in zip(pieces, route[0], strict=True):
                assert received.tolist() == piece[:, rank].tolist()
            assert [numbers.tolist() for numbers in route[1]] == [k.tolist() for k in kept]
        assert header.outside_ids_W == [5 if r == bad_rank else 0 for r in range(world_size)]
        assert header.bad_weights_W == list(range(world_size))
        assert header.bad_lengths_W == [r == bad_rank for r in range(world_size)]
        assert header.any_data == bool(ranks_with_data)


def _hot_sums(rank: int, world_size: int) -> list[Tensor]:
    torch.manual_seed(rank)
    sums = []
    for dims, touched in (((8,), (6,)), ((4, 8), (3, 5)), ((4,), (0,))):
        positions = [torch.arange(count)[rank % 2 :: 2] for count in touched]
        grads = [torch.randn(p.numel(), dim) for p, dim in zip(positions, dims)]
        outputs = [torch.full((count, dim), 9.0) for count, dim in zip(touched, dims)]
        reduction = HotReduction(Ranks(dist.group.WORLD), grads, positions, outputs)
        sums += [output.clone() for output in reduction.wait()]
        dense = [torch.zeros(count, dim) for count, dim in zip(touched, dims)]
        for full, place, grad in zip(dense, positions, grads):
            full[place] = grad
            dist.all_reduce(full)
        for actual, expected in zip(outputs, dense):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    return sums


def _exchange(rank: int, world_size: int) -> list[Tensor]:
    _all_to_all(rank, world_size)
    _headers(rank, world_size)
    return _hot_sums(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_arrives_is_what_was_sent_and_sums_have_the_same_bits_everywhere(
    world_size: int,
) -> None:
    first, *others = run_ranks(_exchange, world_size, timeout_s=60)
    for other in others:
        assert all(torch.equal(mine, its) for mine, its in zip(first, other))
