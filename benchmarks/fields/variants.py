"""Variants: a plan under a train pipeline."""

from __future__ import annotations

from benchmarks.pipelines.variants import Variant
from torchrec_picasso.errors import ConfigError

AGAIN = "table_wise_again"
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(name="planner", placement="planner"),
        *(
            Variant(name=f"{kind}{loop}", placement=kind, pipeline=pipeline)
            for loop, pipeline in (("", "sparse_dist"), ("_loop", "loop"))
            for kind in ("table_wise", "row_wise", "column_wise")
        ),
        Variant(name=AGAIN, placement="table_wise", is_again=True),
        Variant(name="table_wise_ours", placement="table_wise", pipeline="interleaved"),
        Variant(name="ours", placement="hot_cold", pipeline="interleaved"),
        Variant(name="ours_plain", placement="hot_cold"),
        Variant(name="ours_loop", placement="hot_cold", pipeline="loop"),
        Variant(name="all_rows", placement="hot_cold", pipeline="interleaved", hot_rows=0),
        Variant(name="all_rows_plain", placement="hot_cold", hot_rows=0),
        Variant(name="all_bags", placement="bags", pipeline="interleaved"),
    )
}
_MOST_VALUES = {"rows": 2, "bags": 1}


def named(names: tuple[str, ...]) -> list[Variant]:
    """The variants of these names.

    Raises:
        ConfigError: If there is none of a name, or none of them is stock.
    """
    found = [VARIANTS.get(name) or _by_hand(name) for name in names]
    if not any(variant.is_stock for variant in found):
        raise ConfigError("--variants: there is no stock one to compare with; add table_wise")
    return found


def _by_hand(name: str) -> Variant:
    """All tables in one form, hot rows and micro-batches given."""
    kind, *texts = name.split(":")
    is_number = all(text.isdecimal() for text in texts)
    if kind not in _MOST_VALUES or not is_number or not 1 <= len(texts) <= _MOST_VALUES[kind]:
        raise ConfigError(
            f"--variants: got {name!r}; the names are {', '.join(VARIANTS)}, "
            "rows:MICRO_BATCHES, rows:MICRO_BATCHES:HOT_ROWS and bags:MICRO_BATCHES"
        )
    num_micro_batches, *hot_rows = map(int, texts)
    return Variant(
        name=name,
        placement="hot_cold" if kind == "rows" else "bags",
        pipeline="interleaved",
        num_micro_batches=num_micro_batches,
        hot_rows=hot_rows[0] if hot_rows else 0,
    )
