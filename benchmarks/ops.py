"""Measure the operators' implementations that run here: whole training steps with one exchanged, against native ones.

A step is forward and backward of a Llama-shaped model. Native and exchanged steps alternate on the same model, and the
figure is the ratio inside such a pair of the CPU time of the process, user and system, which other work on the machine
moves less than the clock. What torch.compile costs is the first step of a process with an empty cache, less a later
one; from both follow the steps that repay it. Timings belong to a quiet machine and to people: nothing in CI runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from torchturbo.ops import find, policy, registry, switches
from torchturbo.ops.replace import remove_all
from torchturbo.runtime import current_runtime

# A part of a model's layers gets the same part of its vocabulary, so that the head keeps its share of a step.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M, 10 of 30 layers": (
        "llama",
        {
            "vocab_size": 49152 // 3,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 10,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-0.5B, 6 of 24 layers": (
        "qwen2",
        {
            "vocab_size": 151936 // 4,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 6,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "experts": (
        "qwen3_moe",
        {
            "vocab_size": 8192,
            "hidden_size": 512,
            "moe_intermediate_size": 256,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
}
FUSED = ("rms_norm", "rope", "swiglu", "cross_entropy")
ALL = "all four"


class Bench:
    """One model and one batch [B, T], and steps on them."""

    def __init__(self, shape: str, rows: int, length: int) -> None:
        kind, settings = SHAPES[shape]
        torch.manual_seed(0)
        device = torch.device(current_runtime().device_type)
        config = AutoConfig.for_model(kind, head_dim=64, max_position_embeddings=2048, **settings)
        self.model: Any = AutoModelForCausalLM.from_config(config).train().to(device)
        self.ids = torch.randint(0, settings["vocab_size"], (rows, length), device=device)
        self.found = find.find(self.model)
        self.bf16 = False

    def step(self) -> tuple[float, float]:
        """Take a step, and return its seconds of CPU time (of the clock on an accelerator) and of the clock."""
        runtime = current_runtime()
        runtime.synchronize()
        cpu, wall = time.process_time(), time.perf_counter()
        with torch.autocast(runtime.device_type, torch.bfloat16) if self.bf16 else nullcontext():
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        runtime.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.model.zero_grad(set_to_none=True)
        return (cpu if runtime.device_type == "cpu" else wall), wall

    @contextmanager
    def with_ops(self, ops: tuple[str, ...]) -> Iterator[None]:
        """Exchange operators for their best implementation here."""
        runtime = current_runtime()
        situation = policy.Situation(self.model, runtime, "bfloat16" if self.bf16 else "float32")
        handles: list[Any] = []
        for op in ops:
            row = next(row for row in registry.of(op) if row.refusal(runtime, situation.dtype) is None)
            handles += row.load()(self.found.of(op), situation)
        try:
            yield
        finally:
            remove_all(handles)

    @contextmanager
    def with_experts(self, name: str) -> Iterator[None]:
        """Let experts use one of Transformers' implementations."""
        self.model.set_experts_implementation(name)
        yield

    @contextmanager
    def with_our_experts(self) -> Iterator[None]:
        """Let experts multiply in groups in autocast's format."""
        self.model.set_experts_implementation("grouped_mm")
        handles = switches.grouped_mm(self.found.of("grouped_mm"), None)
        try:
            yield
        finally:
            remove_all(handles)


def pairs(bench: Bench, base: Callable[[], Any], other: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of alternating steps."""
    seconds: dict[str, list[float]] = {"base": [], "other": []}
    for at in range(-1, rounds):
        for name, context in (("base", base), ("other", other)):
            with context():
                taken, _ = bench.step()
            if at >= 0:
                seconds[name].append(taken)
    return seconds


def first_step(shape: str, op: str, rows: int, length: int, threads: int) -> float:
    """Return the CPU seconds by which an empty compiler cache makes a process's first step longer, compilers included."""
    with tempfile.TemporaryDirectory() as cache:
        words = [sys.executable, __file__, "--first-step-of", op, "--shape", shape]
        words += ["--rows", str(rows), "--length", str(length), "--threads", str(threads)]
        told = subprocess.run(
            words, check=True, capture_output=True, text=True, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        )
    return float(told.stdout.split()[-1])


def take_first_step(shape: str, op: str, rows: int, length: int) -> float:
    """Take two steps in this process, and return how much more the first took."""
    bench = Bench(shape, rows, length)
    bench.step()  # what any first step costs
    spent = []
    with bench.with_ops(FUSED if op == ALL else (op,)):
        for _ in range(2):
            before = os.times()
            bench.step()
            spent.append(sum(os.times()[:4]) - sum(before[:4]))  # with the compilers that it started
    return spent[0] - spent[1]


def row(name: str, seconds: dict[str, list[float]]) -> tuple[float, float]:
    """Print a line of a table's beginning, and return the median step of the base and the ratio."""
    ratios = [other / base for base, other in zip(seconds["base"], seconds["other"], strict=True)]
    base, ratio = statistics.median(seconds["base"]), statistics.median(ratios)
    print(f"| {name} | {base:.2f} | {ratio:.3f} | {min(ratios):.2f} to {max(ratios):.2f} |", end="")
    return base, ratio


def fused(shape: str, rows: int, length: int, rounds: int, threads: int) -> dict[str, Any]:
    """Measure the fused operators of one shape, each alone and together."""
    bench = Bench(shape, rows, length)
    compiling = current_runtime().device_type == "cpu"
    print(f"\n{shape}, {rows} rows of {length} tokens, fp32\n")
    print("| operator | native step s | x native | spread |", end="")
    print(" compiling s | steps that repay it |" if compiling else "")
    print("| --- | ---: | ---: | ---: |" + (" ---: | ---: |" if compiling else ""))
    all_seconds: dict[str, Any] = {}
    for op in (*FUSED, ALL):
        ops = FUSED if op == ALL else (op,)
        seconds = pairs(bench, nullcontext, lambda ops=ops: bench.with_ops(ops), rounds)
        base, ratio = row(op, seconds)
        if compiling and op != ALL:
            print(" | |", end="")
        elif compiling:
            extra = first_step(shape, op, rows, length, threads)
            repaid = f"{extra / (base * (1 - ratio)):.0f}" if ratio < 1 else "never"
            print(f" {extra:.0f} | {repaid} |", end="")
            seconds["compiling"] = [extra]
        print(flush=True)
        all_seconds[op] = seconds
    return all_seconds


def experts(rows: int, length: int, rounds: int) -> dict[str, Any]:
    """Measure the experts' implementations; batched_mm copies a weight for every token, so it gets few of them."""
    print(f"\nexperts, {rows} rows of {length} tokens ({length // 2} for batched_mm, one row)\n")
    print("| experts | step of the first s | x the first | spread |\n| --- | ---: | ---: | ---: |")
    bench, small = Bench("experts", rows, length), Bench("experts", 1, length // 2)
    seconds = {}
    for name, at in (("grouped_mm", bench), ("batched_mm", small)):
        title = f"eager, {name}; fp32"
        seconds[title] = pairs(
            at, lambda at=at: at.with_experts("eager"), lambda at=at, name=name: at.with_experts(name), rounds
        )
        row(title, seconds[title])
        print(flush=True)
    bench.bf16 = True
    title = "Transformers' grouped_mm, ours; bf16"
    seconds[title] = pairs(bench, lambda: bench.with_experts("grouped_mm"), bench.with_our_experts, rounds)
    row(title, seconds[title])
    print(flush=True)
    return seconds


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--shape", choices=[*SHAPES], action="append", help="one of them alone; repeatable")
    parser.add_argument("--json", action="store_true", help="print every figure")
    parser.add_argument("--first-step-of", choices=[*FUSED, ALL], help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.first_step_of:
        print(take_first_step(given.shape[0], given.first_step_of, given.rows, given.length))
        return
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, CPython {platform.python_version()}, ",
        end="",
    )
    print(f"{current_runtime().device_name()}, {given.rounds} pairs")
    figures: dict[str, Any] = {}
    for shape in given.shape or SHAPES:
        if shape == "experts":
            figures[shape] = experts(given.rows, given.length, given.rounds)
        else:
            figures[shape] = fused(shape, given.rows, given.length, given.rounds, given.threads)
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
