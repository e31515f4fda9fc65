"""Measure an export of a sharded model against ``save_pretrained`` alone, and against torch's own writer of such files.

On one rank ``save_pretrained`` writes the model it has. On several it gets the state dict that all ranks gather, which
the first one then holds whole. The third way is ``torch.distributed.checkpoint`` with ``HuggingFaceStorageWriter``: each
rank writes its shards, and one joins them. All write fp32. ``benchmarks/engine.py`` calls :func:`measure`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from engine_pairs import Measured, Ratio, Side, Turns, measure as take_turns, ratio  # noqa: E402, I001

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MIB = 1 << 20


class Compared(NamedTuple):
    """An export beside another way to write the same model."""

    name: str
    own: Measured
    other: Measured

    @property
    def ratio(self) -> Ratio:
        """The export's cost over the other's."""
        return ratio(self.own.steps, self.other.steps)


def model(settings: dict[str, Any]) -> Any:
    """Return a random model, sharded layer by layer where there are several ranks."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind, sizes = ("qwen3_moe", MODEL | EXPERTS) if settings["moe"] else ("qwen3", MODEL)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).to(settings["device"])
    if settings["ranks"] > 1:
        for layer in made.model.layers:
            fully_shard(layer)
        fully_shard(made)
    return made


def ours(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Export with TorchTurbo."""
    from torchturbo.checkpoint.hf_export import export

    made = model(settings)
    size = settings["max_shard_size"]
    turns.repeat(lambda: export(made, Path(settings["folder"], "out"), saved_dtypes={}, max_shard_size=size))


def save_pretrained(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Gather the whole model, and save it on the first rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    made = model(settings)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save() -> None:
        state = get_model_state_dict(made, options=whole) if settings["ranks"] > 1 else None
        if rank == 0:
            made.save_pretrained(Path(settings["folder"], "out"), state_dict=state)

    turns.repeat(save)


def writer(rank: int, turns: Turns, settings: dict[str, Any]) -> None:
    """Write shards and join them, by torch."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    made = model(settings)
    out = Path(settings["folder"], "out")

    def save() -> None:
        state = get_model_state_dict(made)
        if rank == 0:
            shutil.rmtree(out, ignore_errors=True)
        files = HuggingFaceStorageWriter(
            str(out),
            save_distributed=True,
            fqn_to_index_mapping=dict.fromkeys(state, 1),
            enable_consolidation=True,
        )
        dcp.save(state, storage_writer=files, no_dist=settings["ranks"] == 1)

    turns.repeat(save)


Program = Callable[[int, Turns, dict[str, Any]], None]
OTHERS: dict[str, Program] = {"save_pretrained": save_pretrained, "HuggingFaceStorageWriter": writer}


def measure(
    other: str = "save_pretrained",
    ranks: int = 2,
    rounds: int = 20,
    device: str = "cpu",
    *,
    moe: bool = False,
    max_shard_size: str = "5GB",
) -> Compared:
    """Return what an export costs beside one of :data:`OTHERS`, turn by turn."""
    settings = {"moe": moe, "max_shard_size": max_shard_size}
    sides = (
        Side("export", ours, ranks, settings),
        Side(other, OTHERS[other], ranks, settings),
    )
    return Compared(other, *take_turns(*sides, rounds, device, warm_up=1))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--moe", action="store_true", help="a model with 16 experts in each layer")
    parser.add_argument("--max_shard_size", default="5GB", help="the most bytes of one file of the export")
    given = parser.parse_args()
    sizes = {"moe": given.moe, "max_shard_size": given.max_shard_size}
    for ranks in given.ranks:
        for other in OTHERS:
            found = measure(other, ranks, given.rounds, given.device, **sizes)
            mean, upper, low, high = found.ratio
            print(
                f"{ranks} ranks, export over {other}: {mean:.2f} (at most {upper:.2f}, {low:.2f} to {high:.2f}); "
                f"most memory over the floor {found.own.own / MIB:.0f} MiB against {found.other.own / MIB:.0f} MiB",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
