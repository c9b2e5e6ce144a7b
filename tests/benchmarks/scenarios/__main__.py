"""``python -m tests.benchmarks.scenarios [--quick] [--scale X] [--only PART]``: figures as JSON, one line a part."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from tests.benchmarks.scenarios import causes, measure

SEED = 20_260


def parts(quick: bool, scale: float = 1.0) -> dict[str, Callable[[], measure.Figures]]:
    def size(small: int, full: int) -> int:
        return small if quick else max(small, round(scale * full))

    def cause(name: str) -> Callable[[], measure.Figures]:
        return lambda: causes.cause(name, size(1, 300), SEED)

    return {
        "cost": lambda: measure.cost(size(10_000, 100_000), SEED),
        "coverage": lambda: measure.coverage(size(60, 2000), SEED),
        "stable": lambda: measure.stable(size(15_000, 2_000_000), SEED),
        "delays": lambda: measure.delays(size(3, 100), size(20_000, 400_000), SEED),
        "small segment": lambda: measure.small_segment(size(1, 20), SEED),
        **{f"cause: {name}": cause(name) for name in causes.SCENARIOS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scenarios", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: under a minute, no figures to quote")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full sizes, which take half an hour")
    parser.add_argument("--only", action="append", choices=list(parts(True)))
    options = parser.parse_args()
    for name, measured in parts(options.quick, options.scale).items():
        if options.only and name not in options.only:
            continue
        started = time.perf_counter()
        figures = measured()
        print(json.dumps({"part": name, "seconds": round(time.perf_counter() - started, 1), **figures}), flush=True)


if __name__ == "__main__":
    main()
