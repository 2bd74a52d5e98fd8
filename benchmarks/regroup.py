"""What a ``KTRegroupAsDict`` takes on one core: FBGEMM's operator against a copy by name.

    python -m benchmarks.regroup
    python -m benchmarks.regroup --fields 40 130 --json benchmarks/results/regroup.json

Pooled columns of many fields, of dims 8 to 64, in two groups and another order. CPU time of the
process, forward and backward, variants in turns, medians.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.app.zoo.data.field_specs import LEAST_ROWS, draw_fields
from torchrec_picasso.train_pipeline.regroup import regroup

_Forward = Callable[[Sequence[KeyedTensor]], dict[str, Tensor]]


def measure(num_fields: int, batch_size: int, times: int) -> dict[str, Any]:
    """Milliseconds of forward and backward."""
    fields = draw_fields(num_fields, LEAST_ROWS, seed=0)
    names, dims = [of.feature for of in fields], [of.dim for of in fields]
    order = random.Random(0).sample(names, num_fields)
    module = KTRegroupAsDict([order[::2], order[1::2]], ["one", "other"])
    variants: dict[str, _Forward] = {"fbgemm": module, "ours": lambda kts: regroup(module, kts)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(times + 1):
        for name, forward in variants.items():
            values = torch.randn(batch_size, sum(dims), requires_grad=True)
            start_s = time.process_time()
            groups = list(forward([KeyedTensor(names, dims, values)]).values())
            middle_s = time.process_time()
            torch.autograd.backward(groups, groups)
            taken[name].append((middle_s - start_s, time.process_time() - middle_s))
    found: dict[str, Any] = {"fields": num_fields, "columns": sum(dims), "batch_size": batch_size}
    for name, times_s in taken.items():
        for part, of in zip(("forward", "backward"), zip(*times_s[1:])):
            found[f"{name}_{part}_ms"] = 1e3 * median(of)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints one line per number of fields."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fields", type=int, nargs="+", default=[40, 130], metavar="N")
    parser.add_argument("--batch-size", type=int, default=2048, help="samples")
    parser.add_argument("--times", type=int, default=5, help="of each; median")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [measure(number, args.batch_size, args.times) for number in args.fields]
    for of in found:
        print(", ".join(f"{name} {value:.4g}" for name, value in of.items()))
    if args.json:
        document = {"environment": describe_environment(), "regroup": found}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
