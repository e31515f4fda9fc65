"""Tiny checkpoints that hold heads for multi-token prediction, written in the layout of published ones by hand.

The blocks of the heads are further layers of a model without heads, under the names that Transformers gives them; the
rest is put beside them in the files, and the configuration says how many of the layers are heads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint import families

LAYERS = 2
HIDDEN = 32
GATED = {"num_v_heads": 2, "num_k_heads": 2, "key_head_dim": 8, "value_head_dim": 8, "conv_kernel_dim": 2}
QWEN3_NEXT: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "partial_rotary_factor": 0.5, **{f"linear_{name}": value for name, value in GATED.items()},
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "deepseek_v3": (
        "deepseek_v3",
        {**families.MOE, **families.LATENT, "n_group": 2, "head_dim": 4, "num_key_value_heads": 4},
        2,
    ),
    "glm4_moe": ("glm4_moe", {**families.MOE, "n_group": 1, "use_qk_norm": True, "head_dim": 8}, 1),
    "qwen3_next": ("qwen3_next", QWEN3_NEXT, 1),
}
"""Model type, sizes, and how many heads."""


def random(*shape: int) -> Tensor:
    return torch.randn(shape) / 8


def head_tensors(kind: str, at: int, tensors: dict[str, Tensor], *, copies: bool = True) -> dict[str, Tensor]:
    """Return a head's tensors, by their names in the files, from those of a layer behind the model's own."""
    layer = f"model.layers.{LAYERS + at}."
    block = {name.removeprefix(layer): one for name, one in tensors.items() if name.startswith(layer)}
    if kind == "qwen3_next":
        made = {f"mtp.layers.{at}.{name}": one for name, one in block.items()}
        if at == 0:
            made |= {f"mtp.{name}.weight": random(HIDDEN) for name in
                     ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")} | {"mtp.fc.weight": random(HIDDEN, 2 * HIDDEN)}  # fmt: skip
        return made
    made = {f"{layer}{name}": one for name, one in block.items()}
    made |= {f"{layer}{name}.weight": 1 + random(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    made[f"{layer}eh_proj.weight"] = random(HIDDEN, 2 * HIDDEN)
    if copies:
        made[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        made[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return made


def save(folder: Path, family: str, dtype: str = "bfloat16", *, copies: bool = True, **changes: Any) -> Path:
    """Write a random checkpoint with heads."""
    kind, sizes, depths = MODELS[family]
    types = {"layer_types": ["linear_attention"] + ["full_attention"] * (LAYERS + depths - 1)}
    types = types if kind == "qwen3_next" else {}
    long = tiny.model(kind, num_hidden_layers=LAYERS + depths, **{**sizes, **types, **changes}).to(
        getattr(torch, dtype)
    )
    for name, value in (*long.named_buffers(), *long.named_parameters()):
        if name.endswith("e_score_correction_bias") or value.dim() == 1:  # ones and zeros would hide a mistake
            value.data.uniform_(0.5, 1.5)
    long.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    heads = {}
    for at in range(depths):
        heads |= head_tensors(kind, at, tensors, copies=copies)
    own = {name: one for name, one in tensors.items() if not behind(name)}
    made = {name: one.to(getattr(torch, dtype)).contiguous() for name, one in (own | heads).items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"num_hidden_layers": LAYERS}
    if kind != "qwen3_next":  # whose published models do not say
        settings["num_nextn_predict_layers"] = depths
    else:
        settings["layer_types"] = settings["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(settings))
    tiny.tokenizer().save_pretrained(folder)
    return folder


def behind(name: str) -> bool:
    """Return whether a tensor is of a layer behind the model's own, by its name."""
    words = name.split(".")
    return "layers" in words and int(words[words.index("layers") + 1]) >= LAYERS


def is_head(name: str) -> bool:
    """Return whether a tensor of the files belongs to the heads."""
    return name.startswith("mtp.") or behind(name)


def stored(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's files."""
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def attached(base: Any, folder: Path | None = None) -> Any:
    """Give a model the heads of its family, on its own device, without their weights; returns the model."""
    from torchturbo.objectives.heads import attach
    from torchturbo.objectives.mtp.families import find

    found = find(base, None if folder is None else list(stored(folder)))
    assert found is not None and found.build is not None, found
    with torch.device(next(base.parameters()).device):
        attach(base, found.build(base))
    return base


def is_copy(name: str) -> bool:
    """Return whether a tensor of the heads repeats one of the model's."""
    return is_head(name) and name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


def copied(name: str) -> str:
    """Return what such a tensor repeats."""
    return "model.embed_tokens.weight" if name.endswith("embed_tokens.weight") else "lm_head.weight"
