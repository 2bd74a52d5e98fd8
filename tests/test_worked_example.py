"""The worked example of docs/architecture.md, computed again: two ranks, six ids each, one hot row.

Every cell of the table in the document is compared with what the code does on fake ranks.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.rows.worlds import (
    World,
    features_of,
    fill_replicas,
    make_world,
    table_of,
    whole_tables,
)
from torchrec_picasso.ops.bags import micro_batch_of_lookup, segment_edges
from torchrec_picasso.ops.row_order import first_use_chunks
from torchrec_picasso.ops.segment_reduction import gradient_of_rows, pool_rows
from torchrec_picasso.rows.batch_gradients import BatchGradients, update_rows
from torchrec_picasso.rows.batch_rows import BatchRows
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.rows.route import PackLayout

DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"
HEADING = "## A batch, worked out"
FEWEST_LINES = 20
"""The document must have at least these; a walk that sees nothing compares nothing."""

NUM_RANKS, NUM_PARTS, DIM = 2, 2, 4
BEFORE = [[[[1], [1]], [[0], [0]]], [[[1], [1]], [[3], [0]]]]
"""Ids by rank, feature (user, item) and sample, of the batch before."""
THIS = [[[[1], [2]], [[0, 3], [3, 1]]], [[[3], [1]], [[0, 5], [3, 0]]]]

Lines = dict[str, tuple[str, ...]]


def _world() -> World:
    """Each row holds its linear id in every column."""
    tables = [table_of("user", 0, DIM, [2, 2], []), table_of("item", 0, DIM, [3, 3], [0])]
    ids = torch.arange(10.0).unsqueeze(1).expand(-1, DIM)
    world = make_world(NUM_RANKS, tables, [ids[:4].clone(), ids[4:].clone()])
    fill_replicas(world)
    return world


def _request(world: World, bags_W: Sequence[Any]) -> list[RowRequest]:
    return [
        RowRequest(group, [features_of(world, bags)], [1] * NUM_PARTS)
        for group, bags in zip(world.groups, bags_W)
    ]


def _join(*groups: Any) -> str:
    """Numbers of each group, groups parted by a bar; a dash for an empty one."""
    return " / ".join(" ".join(map(_number, group)) or "-" for group in groups)


def _number(value: Any) -> str:
    return f"{float(value):g}"


def _cut(values: Sequence[Any], slices: Iterable[slice]) -> list[Sequence[Any]]:
    return [values[where] for where in slices]


def _each(values: Sequence[Any], what: Callable[..., str]) -> tuple[str, ...]:
    return tuple(map(what, values))


@cache
def worked_example() -> Lines:
    """Everything that the document says, by the name of the line; a string per rank."""
    world = _world()
    before = _request(world, BEFORE)
    for request in before:
        request.send_row_numbers()
    for request in before:
        request.receive_row_numbers()
    requests = _request(world, THIS)
    lines = _id_lines(world, requests)
    sent = [rank.sent_elements for rank in world.ranks]
    for request in requests:
        request.send_row_numbers()
    lines["bytes of row numbers sent"] = tuple(
        str(4 * (rank.sent_elements - n)) for rank, n in zip(world.ranks, sent)
    )
    for request in requests:
        request.receive_row_numbers()
    for request, earlier in zip(requests, before):
        request.send_dirty_mask(earlier)
    layouts = [request.build_layout() for request in requests]
    packs = [layout.packs[0] for layout in layouts]
    rows_W = [BatchRows(group, layout) for group, layout in zip(world.groups, layouts)]
    for fetch in (
        BatchRows.fetch_clean,
        *(lambda rows, chunk=chunk: rows.fetch_dirty(chunk) for chunk in range(NUM_PARTS)),
        BatchRows.read_hot,
    ):
        for rows in rows_W:
            fetch(rows)
    gradients = [BatchGradients(group, layout) for group, layout in zip(world.groups, layouts)]
    lines |= _part_lines(rows_W, gradients)
    # A row holds its linear id in each column.
    fetched = [rows._matrices.tensors[0][:, 0].long() for rows in rows_W]
    return lines | _layout_lines(packs, fetched) | _update_lines(world, packs, gradients)


def _packed(batch: RowRequest) -> list[int]:
    """Linear ids in request order."""
    request = _row_lines(batch)
    ids: list[int] = request.ids.rows.ids_U[request.located.order_U].tolist()
    return ids


def _row_lines(batch: RowRequest) -> Any:
    (request,) = batch.by_route
    return request


def _micro_batches_of(request: Any) -> Tensor:
    """The micro-batch of each lookup, in bag order."""
    cut, offsets_S1 = request.cut, request.ids.bags.offsets_S1
    edges_J1 = segment_edges(offsets_S1, cut.bags_by_segment)
    return micro_batch_of_lookup(edges_J1, cut.micro_batch_by_segment, int(offsets_S1[-1]))


def _id_lines(world: World, batches: Sequence[RowRequest]) -> Lines:
    features = [batch.features for batch in batches]
    requests = [_row_lines(batch) for batch in batches]
    chunks = [first_use_chunks(r.ids.rows, _micro_batches_of(r), NUM_PARTS) for r in requests]
    (route,) = world.groups[0].routes
    hot = route.hot
    chunk_words = [
        [
            "hot" if is_hot else str(int(chunk))
            for is_hot, chunk in zip(hot.find(r.ids.rows.ids_U.long())[1], c)
        ]
        for r, c in zip(requests, chunks)
    ]
    counts = [r.located.counts_PQ[0].tolist() for r in requests]
    sent = [b.header_exchange.sent_WX for b in batches]

    def request_order(rank: int) -> str:
        ids, (num_hot, *places) = _packed(batches[rank]), counts[rank]
        return _join(ids[:num_hot], *torch.tensor(ids[num_hot:]).split(_by_chunk(places)))

    ranks = range(NUM_RANKS)
    return {
        "ids by feature (user / item)": _each(
            features, lambda f: _join(*f.values().split(f.length_per_key()))
        ),
        "linear ids": _each(
            [route.space.linearize(f.values(), _lookups(f).cumsum(0))[0] for f in features],
            lambda ids: _join(ids),
        ),
        "in bag order, by micro-batch": _each(
            requests,
            lambda r: _join(
                *r.ids.rows.ids_U[r.ids.rows.row_of_lookup_N].split(
                    torch.bincount(_micro_batches_of(r)).tolist()
                )
            ),
        ),
        "unique rows": _each(requests, lambda r: _join(r.ids.rows.ids_U)),
        "row of each lookup": _each(requests, lambda r: _join(r.ids.rows.row_of_lookup_N)),
        "chunk of each unique row": _each(chunk_words, " ".join),
        "request order (hot / chunk 0 / chunk 1)": tuple(map(request_order, ranks)),
        "header to rank 0": _each(sent, lambda words: _join(words[0])),
        "header to rank 1": _each(sent, lambda words: _join(words[1])),
        "bytes of header sent": _each(sent, lambda words: str(words[0].nbytes)),
    }


def _lookups(features: Any) -> Tensor:
    return torch.tensor(features.length_per_key())


def _by_chunk(places: Sequence[int]) -> list[int]:
    return torch.tensor(places).view(NUM_PARTS, NUM_RANKS).sum(1).tolist()


def _layout_lines(packs: Sequence[PackLayout], fetched: Sequence[Tensor]) -> Lines:
    exchanges = range(1 + NUM_PARTS)

    def fetch_order(rank: int) -> str:
        pack, ids = packs[rank], fetched[rank]
        cold = _cut(ids, (pack.in_matrix(pack.wanted_by_fetch.slice_of(e)) for e in exchanges))
        return _join(ids[pack.hot_slice], *cold)

    def from_the_other(rank: int) -> str:
        pack, ids, received = packs[rank], fetched[rank], []
        for exchange, counts_W in enumerate(pack.wanted_by_fetch.counts_EW):
            by_rank = ids[pack.in_matrix(pack.wanted_by_fetch.slice_of(exchange))].split(counts_W)
            received.append(by_rank[1 - rank])
        return _join(*received)

    ranks = range(NUM_RANKS)
    return {
        "home row numbers asked of it (chunk 0 / chunk 1)": _each(
            packs,
            lambda p: _join(
                *_cut(p.requests.home_row_numbers_n, map(p.served.slice_of, range(NUM_PARTS)))
            ),
        ),
        "fetch order (hot / clean / dirty 0 / dirty 1)": tuple(map(fetch_order, ranks)),
        "rows that come over the wire (clean / dirty 0 / dirty 1)": _each(ranks, from_the_other),
    }


def _part_lines(rows_W: Sequence[BatchRows], gradients: Sequence[BatchGradients]) -> Lines:
    """Forward of all parts, then backward from the last to the first, upstream gradients 1."""
    lines: Lines = {}
    grads_WK: list[list[Any]] = [[] for _ in rows_W]
    for part in range(NUM_PARTS):
        given = [rows.acquire(part, lambda _: None) for rows in rows_W]
        pooled = []
        for on_rank, grads_K in zip(given, grads_WK):
            (matrix,) = on_rank.arrive()
            index = on_rank.pooling_M[0].index
            pooled.append(pool_rows(matrix, None, index))
            grads_K.append([gradient_of_rows(torch.ones_like(pooled[-1]), None, index)])
        name = f"micro-batch {part}"
        lines[f"{name}: position of each lookup in the matrix"] = _each(
            given, lambda each: _join(each.pooling_M[0].index.row_of_lookup_N)
        )
        lines[f"{name}: pooled (user / item)"] = _each(pooled, lambda p: _join(*p[:, :1]))
        lines[f"{name}: position of each gradient in request order"] = _each(
            given, lambda each: _join(each.pooling_M[0].index.gradient_position_U)
        )
    for part in reversed(range(NUM_PARTS)):
        for summed, grads_K in zip(gradients, grads_WK):
            summed.add(part, grads_K[part])
        for summed in gradients:
            summed.send(part)
    for summed in gradients:
        summed.reduce_hot()
    lines["summed gradients in request order"] = _each(
        gradients, lambda summed: _join(summed._sums_M[0][:, 0])
    )
    return lines


def _update_lines(
    world: World, packs: Sequence[PackLayout], gradients: Sequence[BatchGradients]
) -> Lines:
    tables = whole_tables(world)
    arrived = []
    for summed, pack in zip(gradients, packs):
        *_, grads = summed.arrived(0)
        arrived.append(grads.clone())
        summed._pending_P[0] = [_Over()]  # the update waits for nothing more
        assert len(grads) == pack.served.num_rows + pack.touched.slots_t.numel()
    for group, summed in zip(world.groups, gradients):
        update_rows(group, [summed])
    replicas = [group.storages[0].tables.weights.replicas[:, 0] for group in world.groups]
    moved = [after - before for before, after in zip(tables, whole_tables(world))]
    homes = zip(*(table.split(len(table) // NUM_RANKS) for table in moved))
    return {
        "gradients at home (chunk 0 / chunk 1 / replica)": tuple(
            _join(
                *_cut(grads[:, 0], map(pack.served.slice_of, range(NUM_PARTS))),
                grads[pack.served.num_rows :, 0],
            )
            for grads, pack in zip(arrived, packs)
        ),
        "change of its home rows (user / item)": _each(
            list(homes), lambda from_tables: _join(*(rows[:, 0] for rows in from_tables))
        ),
        "its replica of row 4": _each(replicas, lambda each: _join(each)),
    }


class _Over:
    """Something that has been waited for."""

    def wait(self) -> None:
        """Returns at once."""


def _lines_of_document() -> Lines:
    text = DOCUMENT.read_text().split(HEADING)[1].split("\n## ")[0]
    lines = {}
    for row in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        name, *cells = (cell.strip() for cell in row.split(" | "))
        if cells[0].startswith("`"):
            lines[name] = tuple(cell.strip("`") for cell in cells[:NUM_RANKS])
    return lines


def test_the_document_says_what_the_code_does() -> None:
    found = _lines_of_document()
    assert len(found) >= FEWEST_LINES
    assert found == worked_example()
