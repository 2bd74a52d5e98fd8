"""The kinds of files that users give: good ones, damaged ones, how they are read and then used.

Every kind has ``seeds``, which writes good files; ``damage``, which writes a bad one; and ``use``,
which reads it by the function that users call and does with it what is done next. What cannot be
used should not have been read.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.reliability.fuzz_mutations import (
    mutated_bytes,
    mutated_document,
    mutated_lines,
    yaml_attack,
)
from benchmarks.reliability.fuzz_saved import Checkpoints, HotRows
from benchmarks.reliability.fuzz_target import Target
from benchmarks.reliability.small_model import SmallModel, rank_batch
from torchrec_picasso import CommCurves, FrequencyStats
from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.config.load import load_rules
from torchrec_picasso.app.config.quality import QualityConfig
from torchrec_picasso.cost.curve import Curve
from torchrec_picasso.cost.curves import COLLECTIVES
from torchrec_picasso.cost.dense import DenseTimes
from torchrec_picasso.cost.local import LocalWork
from torchrec_picasso.frequency.summary import summarize
from torchrec_picasso.frequency.tail import TailSample
from torchrec_picasso.options.rules import Rules

__all__ = ["TARGETS"]

_CONFIGS = Path(__file__).parents[2] / "configs"
_WORK = LocalWork(features=2, lookups=100, rows=50, lookup_elements=800, row_elements=400)


class _Configs(Target):
    rules: type[Rules] = TrainConfig
    pattern = "[!q]*.yaml"

    def seeds(self, folder: Path) -> list[Path]:
        found = sorted(_CONFIGS.glob(self.pattern))
        assert found, f"no {self.pattern} in {_CONFIGS}"
        return found

    def change(self, draw: random.Random, seed: Path, marker: Path) -> tuple[str, bytes]:
        content = seed.read_bytes()
        how = draw.random()
        if how < 0.2:
            return mutated_bytes(draw, content)
        if how < 0.3:
            return mutated_lines(draw, content)
        if how < 0.45:
            return yaml_attack(draw, marker)
        what, document = mutated_document(draw, yaml.safe_load(content), odd_keys=True)
        return what, yaml.safe_dump(document).encode("utf-8", errors="replace")

    def use(self, path: Path) -> None:
        config = load_rules(self.rules, path)
        assert isinstance(config, self.rules)
        hash(repr(config))


class _Quality(_Configs):
    rules = QualityConfig
    pattern = "quality*.yaml"


class _Statistics(Target):
    def seeds(self, folder: Path) -> list[Path]:
        model = SmallModel()
        stats = FrequencyStats.collect((rank_batch(step, 0, 1) for step in range(20)), model)
        forms = {
            "exact": stats,
            "decayed": stats.decayed(0.5),
            "shrunk": stats.merge(stats, max_rows_counted=5),
        }
        paths = []
        for name, of_form in forms.items():
            paths.append(folder / f"{name}.parquet")
            of_form.to_parquet(paths[-1])
        assert any(isinstance(of.tail, TailSample) for of in forms["shrunk"].tables.values())
        return paths

    def change(self, draw: random.Random, seed: Path, marker: Path) -> tuple[str, bytes]:
        if draw.random() < 0.3:
            return mutated_bytes(draw, seed.read_bytes())
        table = pq.read_table(seed)
        (key, facts) = next(iter((table.schema.metadata or {}).items()))
        if draw.random() < 0.5:
            what, document = mutated_document(draw, json.loads(facts), odd_keys=False)
            facts = json.dumps(document).encode()
        elif draw.random() < 0.1:
            what, facts = mutated_bytes(draw, facts)
        else:
            what, table = _other_column(draw, table)
        content = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({key: facts}), content)
        return what, content.getvalue()

    def use(self, path: Path) -> None:
        stats = FrequencyStats.from_parquet(path)
        for name, counts in stats.tables.items():
            share, unique = stats.coverage(name, 3), stats.expected_unique(name, 10)
            assert 0 <= share <= 1, f"coverage {share}"
            assert 0 <= unique <= 10, f"{unique} unique rows of 10 lookups"
            cold = counts.spectrum().expected_unique(5)
            assert math.isfinite(cold), f"{cold} unique rows"
            counts.most_frequent_first()
            for feature in counts.feature_names if counts.feature_bags else ():
                assert 0 <= counts.pooling_factor(feature) < math.inf
        assert stats.merge(stats).tables.keys() == stats.tables.keys()
        stats.decayed(0.5)
        stats.to_frame()
        summarize(stats.tables, stats.num_batches, stats.num_samples)


def _other_column(draw: random.Random, table: pa.Table) -> tuple[str, pa.Table]:
    """A column with other values, of another type, or none."""
    place = draw.randrange(table.num_columns)
    name, size = table.column_names[place], table.num_rows
    how = draw.choice(("drop", "value", "value", "type", "nulls", "shuffle", "no lines", "twice"))
    if how == "drop":
        return f"drop {name}", table.drop_columns([name])
    if how == "no lines":
        return "no lines", table.slice(0, 0)
    if how == "twice":
        return "every line twice", pa.concat_tables([table, table])
    values = table.column(name).to_pylist()
    if how == "value":
        values[draw.randrange(size)] = draw.choice((-1, 0, 2**62, -(2**63), 12, 60, 10**6))
    elif how == "nulls":
        values[draw.randrange(size)] = None
    elif how == "shuffle":
        draw.shuffle(values)
    kinds = (pa.float32(), pa.float64(), pa.int8(), pa.uint64(), pa.string(), pa.bool_())
    kind = draw.choice(kinds) if how == "type" else None
    odd = draw.choice((None, math.nan, math.inf, -math.inf, 0.5))
    try:
        if kind == pa.float64() and odd is not None:
            values[draw.randrange(size)] = odd
        column = pa.array(values, kind).cast(kind) if kind else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        column = pa.array([str(value) for value in values])
    return f"{how} of {name}, {column.type}", table.set_column(place, name, column)


class _Curves(Target):
    def seeds(self, folder: Path) -> list[Path]:
        curve = Curve.fit((1000, 10_000, 100_000), (0.1, 0.2, 1.0))
        known = dict.fromkeys(COLLECTIVES, curve)
        plain = CommCurves(world_size=2, backend="gloo", device="cpu", collectives=known)
        full = CommCurves(
            world_size=4,
            ranks_per_host=2,
            backend="gloo",
            device="cpu",
            collectives=known,
            dense=DenseTimes(forward_ms=1.0, backward_ms=2.0, in_parts=((2, 1.1, 2.1),)),
            wire_core_ns=1.5,
            measured_on={"date": "2026-01-01", "cores": 4},
        )
        paths = []
        for name, curves in (("plain", plain), ("full", full)):
            paths.append(folder / f"{name}.json")
            curves.to_json(paths[-1])
        return paths

    def change(self, draw: random.Random, seed: Path, marker: Path) -> tuple[str, bytes]:
        content = seed.read_bytes()
        how = draw.random()
        if how < 0.2:
            return mutated_bytes(draw, content)
        if how < 0.3:
            return mutated_lines(draw, content)
        if how < 0.35:
            attacks = ("[" * 100_000, '{"a":' * 100_000, f'{{"format_version": {"9" * 5000}}}')
            return "deep or long", draw.choice(attacks).encode()
        what, document = mutated_document(draw, json.loads(content), odd_keys=False)
        return what, json.dumps(document).encode("utf-8", errors="replace")

    def use(self, path: Path) -> None:
        curves = CommCurves.from_json(path)
        for of in (curves.collectives,):
            for name, curve in of.items():
                for size in (0, 1, 5000, 10**9):
                    ms = curve.ms_at(size)
                    assert 0 <= ms < math.inf, f"{name} of {size} bytes takes {ms} ms"
                assert curve.gbytes_per_s > 0
        for side in (curves.local.hot_cold, curves.local.stock):
            for cost in (side.input_dist, side.forward, side.backward):
                assert 0 <= cost.ms(_WORK) < math.inf, "local costs"
        if curves.dense is not None:
            assert 0 <= curves.dense.at(64).cut(3).total_ms < math.inf, "dense times"
        assert 0 <= curves.core_ns_per_byte < math.inf
        curves.mismatch(world_size=curves.world_size, device="cpu")


TARGETS: Mapping[str, tuple[type[Target], float]] = {
    "config": (_Configs, 0.33),
    "quality": (_Quality, 0.12),
    "statistics": (_Statistics, 0.22),
    "curves": (_Curves, 0.22),
    "hot_rows": (HotRows, 0.09),
    "checkpoint": (Checkpoints, 0.02),
}
"""Each with its share of the cases; checkpoints are slow."""
