"""Measure what the meter (MFU, HFU, tokens/s) costs: training steps with it and without it, in turn.

The steps are whole ones (forward, backward, AdamW) of one model on one batch; each pair takes one with the meter's
hooks and one without, in an order that changes. The figure is the CPU time of the process, which other work on the
machine moves less than the clock; the ratio is taken inside a pair. Beside it stands the time of the hooks alone,
summed over their calls: what is left of the question where the pairs differ by less than the noise, and what is checked.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from torchturbo.observe.mfu import Meter
from torchturbo.plugins.contract import Run
from torchturbo.runtime import current_runtime

LIMIT = 0.01
"""The most that the meter's hooks may take, as a share of a step."""
SHAPE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip


class Trial:
    """A model, its optimizer, a batch, and the meter."""

    def __init__(self, rows: int, length: int) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).train()
        self.model.config.use_cache = False
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        ids = torch.randint(3, SHAPE["vocab_size"], (rows, length))
        self.batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        self.meter = Meter("h100")
        self.run = Run(None, current_runtime(use_cpu=True), model=self.model)  # type: ignore[arg-type]
        self.hooks = 0.0

    def hook(self, name: str, *arguments: Any) -> None:
        """Call a hook and add its time."""
        start = time.process_time()
        getattr(self.meter, name)(*arguments, self.run)
        self.hooks += time.process_time() - start

    def step(self, metered: bool) -> float:
        """Take a step, which ends with a log, and return its CPU time in seconds."""
        start = time.process_time()
        if metered:
            self.hook("step_begin", [self.batch])
        self.model(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if metered:
            self.hook("step_end")
            self.hook("log", {})
        return time.process_time() - start


def main() -> int:
    """Measure, and say whether the limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if the hooks take over 1 % of a step")
    parser.add_argument("--json", action="store_true", help="print every figure")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    trial = Trial(given.rows, given.length)
    for metered in (False, True):
        trial.step(metered)  # the first makes the optimizer's state, and counts the model
    trial.hooks = 0.0
    pairs = []
    for at in range(given.rounds):
        took = {metered: trial.step(metered) for metered in (False, True)[:: 1 if at % 2 else -1]}
        pairs.append((took[True], took[False]))
    ratio = statistics.median(one / other for one, other in pairs)
    fastest = min(one for one, _ in pairs) / min(other for _, other in pairs)
    plain = statistics.median(other for _, other in pairs)
    alone = trial.hooks / given.rounds
    count = sum(weight.numel() for weight in trial.model.parameters())
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}")
    print(f"{count / 1e6:.1f} M parameters, {given.rows} x {given.length} tokens, {given.rounds} pairs of steps")
    print(f"step without the meter:       {plain * 1e3:9.2f} ms CPU time (median)")
    print(f"step with it, ratio in pairs: {ratio:9.4f} (median; of the fastest {fastest:.4f})")
    print(f"hooks alone, a step:          {alone * 1e3:9.3f} ms, {alone / plain:.3%} of a step")
    if given.json:
        print(json.dumps({"pairs": pairs, "hooks": alone}))
    missed = alone / plain > LIMIT
    if missed:
        print("missed: the meter takes more than 1 % of a step", file=sys.stderr)
    return 1 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
