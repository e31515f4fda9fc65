"""The families that the guide names can be shared by ranks, and its picture is the one that is drawn."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import parity
import pytest
import sequences
from ranks import run_ranks

from torchturbo.parallel.sequence_check import obstacles

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "sequence-parallelism.md"
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "mixtral": {"sliding_window": 4},
    "gemma2": {"attn_implementation": "eager", "query_pre_attn_scalar": 8, **WINDOWS},
    "gemma3_text": {"query_pre_attn_scalar": 8, **WINDOWS},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
                 "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager", **WINDOWS},
    "phi3": {"pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
}  # fmt: skip


def families() -> list[str]:
    """Return the model types of the guide's table."""
    _heading, *rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|$", GUIDE.read_text(encoding="utf-8"), re.M)
    return rows


def make(kind: str) -> Any:
    return sequences.mla() if kind == "deepseek_v3" else sequences.model(kind, **CHANGES.get(kind, {}))


def measure(rank: int, kinds: list[str]) -> dict[str, dict[str, float]]:
    found = {}
    for kind in kinds:
        model = make(kind)
        assert [] == obstacles(model, 2), kind
        found[kind] = sequences.errors(model, sequences.padded(left=False))
    return found


@pytest.fixture(scope="module")
def errors() -> list[Any]:
    return run_ranks(2, measure, families())


def test_the_guide_names_those_that_people_ask_for() -> None:
    assert {"llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"} <= set(families())


@pytest.mark.parametrize("kind", families())
def test_two_ranks_compute_what_one_does_for_every_family(kind: str, errors: list[Any]) -> None:
    for found in errors:
        assert {} == {name: error for name, error in found[kind].items() if not error <= parity.TOLERANCE}


def test_the_picture_is_drawn_by_its_code() -> None:
    """The committed file is what its code draws."""
    code = runpy.run_path("docs/pictures/sequence_parallelism.py")

    assert code["drawing"]() == code["FILE"].read_text(encoding="utf-8")
