"""Measure the training objectives: a step with each of them against a step without, and what they never hold.

As in ``engine.py`` both programs of a comparison run at the same time and take turns, step by step; a ratio is taken
inside a round, and a limit is held against the upper 95 % bound of the mean ratio. The programs are in
``objectives_steps.py``. What is held at once is not timed but looked at, tensor by tensor (``objectives_tensors.py``).
Timings belong to a quiet machine and to people: nothing in CI runs this.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import engine
import objectives_steps as steps
import objectives_tensors as tensors
from engine import Comparison

SLACK = 1.2
"""How far over the work of its depths a step of multi-token prediction may be."""


def comparisons() -> tuple[Comparison, ...]:
    """Return what is compared; the limit of multi-token prediction follows from the model's sizes."""
    limit = round(SLACK * (1 + steps.share_of_a_depth()), 3)
    return (
        Comparison("mtp", steps.mtp, 1, limit, "MTP, one depth, chunked loss, over the plain chunked loss"),
        Comparison("dspark", steps.dspark, 1, None, "DSpark, one layer, over the plain chunked loss"),
        Comparison("routers", steps.routers, 1, None, "both router losses over none"),
        Comparison("diffusion", steps.diffusion, 1, None, "block diffusion over the plain loss"),
        Comparison("cap", steps.cap, 1, None, "block diffusion with CAP over it without"),
    )


NAMES = ("mtp", "dspark", "routers", "diffusion", "cap")
HELD: dict[str, Callable[[], tensors.Held]] = {"dspark": tensors.draft_logits, "diffusion": tensors.diffusion_mask}
"""What is looked at beside the comparison of this name."""


def main() -> int:
    """Measure, look, and say whether the limits were kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is missed")
    parser.add_argument("--json", action="store_true", help="print every figure")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: a bound needs two rounds or more")
    wanted = given.only or NAMES
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"a depth's share of the model's products: {steps.share_of_a_depth():.3f}\n")
    engine.print_head(given.rounds, given.device)
    results = []
    for comparison in comparisons():
        if comparison.name in wanted:
            results.append(engine.compare(comparison, given.rounds, given.device))
            engine.print_row(results[-1])
    missed = [result.comparison.text for result in results if not result.kept]
    held = [HELD[name]() for name in wanted if name in HELD]
    if held:
        print("\n| held at once | found | limit |\n| --- | ---: | ---: |")
    for one in held:
        print(f"| {one.text} | {one.found:,} | {one.limit:,} |")
    missed += [one.text for one in held if one.found > one.limit]
    print(f"\nload of the machine after: {os.getloadavg()[0]:.1f}")
    if given.json:
        print(engine.as_json(results))
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return 1 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
