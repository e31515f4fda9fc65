"""A step of Muon against ``torch.optim.Muon`` on the same sharded matrices, as two programs that take turns.

Both get the matrices of the model that the other pairs train, as DTensors over all ranks, and the same gradients. torch's
own always iterates in bf16, so ours does too: the arithmetic is the same, and the ratio is what is done around it. It
works on matrices alone, so there are no experts here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from engine_pairs import Side, Turns, measure, ratio
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchturbo.optim.muon import MuonAdamW

LIMIT = 2.0
"""How many times the cost of ours torch's step has to be, at least."""
LAYERS = 4
SHAPES = ((512, 512), (256, 512), (256, 512), (512, 512), (1408, 512), (1408, 512), (512, 1408))
"""q, k, v, o, gate, up and down of one layer, in the sizes of ``engine_steps.MODEL``."""
RULE = {"lr": 1e-3, "weight_decay": 0.1}
OURS, TORCHS = "MuonAdamW", "torch.optim.Muon"


def muon_steps(ranks: int = 2) -> tuple[Side, Side]:
    """Return torch's optimizer and ours."""
    return Side(TORCHS, step_torchs, ranks, {}), Side(OURS, step_ours, ranks, {})


def matrices(device: str) -> list[nn.Parameter]:
    """Return matrices with gradients, sharded over all ranks."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES * LAYERS:
        weight, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        parameter = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
        made.append(parameter)
    return made


def step_torchs(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Take steps of torch's optimizer."""
    turns.repeat(torch.optim.Muon(matrices(settings["device"]), adjust_lr_fn="match_rms_adamw", **RULE).step)


def step_ours(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Take steps of the engine's."""
    groups = [{"params": matrices(settings["device"]), "use_muon": True}]
    turns.repeat(MuonAdamW(groups, ns_dtype=torch.bfloat16, **RULE).step)


def main() -> int:
    """Measure this pair alone: ``python benchmarks/engine_muon.py [ROUNDS [DEVICE]]``."""
    rounds, device = int((sys.argv[1:] or ["20"])[0]), (sys.argv[2:] or ["cpu"])[0]
    torchs, ours = measure(*muon_steps(), rounds=rounds, device=device)
    # The cost of ours over torch's: its upper bound is the lower bound of the speed-up.
    found = ratio(ours.steps, torchs.steps)
    print(f"{rounds} rounds on {device}: a step costs {1 / found.mean:.2f} times less than torch's, ", end="")
    print(f"at least {1 / found.upper:.2f} times (95 %); the limit is {LIMIT:g}")
    return int(1 / found.upper < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
