"""The section of ``docs/features.md`` that says which models are proved."""

NUM_OPERATORS = {
    "wide_deep_criteo": 26,
    "dlrm_criteo": 35,
    "deepfm_criteo": 40,
    "din_taobao": 67,
    "dien_taobao": 290,
    "mmoe_generated": 84,
    "can_taobao": 192,
    "wukong_criteo": 83,
    "dhen_fields": 122,
    "tbsm_taobao": 105,
    "hstu_stream": 238,
}
"""Operators that the proof of each configuration's model follows, with histories of 4 clicks."""

_NOT_PROVED = {
    "DIN with Dice (`activation: dice`), BatchNorm": "statistics of the batch",
    "a loss that is a mean over some samples": "it divides by their number: "
    "`loss_reduction='ratio'`",
    "negatives of the same batch": "samples meet in a product",
    "`cross_entropy` with its mean": "it divides by the targets that are not ignored: sum, then "
    "divide by `.shape[0]`",
    "noise, generators, counters, memories in attributes, hooks": "they happen once per forward",
    "compiled or scripted modules": "their operators are not seen",
}


def table() -> str:
    lines = [
        "## What is cut by default",
        "",
        "A batch is cut into micro-batches if [a proof](decisions/cut_proof.md) shows that they",
        "train the same. Dropout then draws other masks, equally likely ones;",
        "`num_micro_batches=1` draws stock's. The proof takes 0.1 to 1.2 s (DIEN 3.2) in the first",
        "step, its guard 60 to 200 microseconds per step.",
        "",
        "proved | operators, histories of 4",
        "---|---",
        *(f"`{name}` | {number}" for name, number in NUM_OPERATORS.items()),
        "",
        "Not proved, so trained in whole batches:",
        "",
    ]
    lines += [f"- {what}: {why}" for what, why in _NOT_PROVED.items()]
    return "\n".join(lines)
