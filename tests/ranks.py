"""Several gloo ranks for a test, forked from a server that has imported torch already: a case costs under a second."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = [
    "psutil",
    "torch.profiler",
    "torch.nn.parallel.distributed",
    "transformers.trainer",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    "transformers.models.glm4_moe.modeling_glm4_moe",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "torchturbo.engine.config",
    "torchturbo.train.run",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "peft",
]
TIMEOUT = 120.0


class RankFailed(AssertionError):
    """What each failed rank had to say, by rank."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())))


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank and return the results in rank order.

    The function is pickled by name, so it stands at the top of its module; results go through ``torch.save``.
    """
    import torch

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_enter, args=(rank, world_size, folder, function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT)
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        failures = dict.fromkeys(stuck, "did not end")
        failures |= {int(path.stem): path.read_text() for path in Path(folder).glob("*.failed")}
        if failures:
            raise RankFailed(failures)
        return [torch.load(Path(folder) / f"{rank}.result", weights_only=False) for rank in range(world_size)]


def _enter(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # the server's million objects are no garbage; walking them would copy every page they lie on
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        torch.save(function(rank, *args), Path(folder) / f"{rank}.result")
        dist.barrier()  # a rank that leaves first would take the connections of the others with it
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.failed").write_text(traceback.format_exc())
        os._exit(1)
