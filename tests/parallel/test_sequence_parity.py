"""Ranks that share sequences against one process: loss, every gradient, and what an evaluation sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import sequences
import tiny
import torch
from ranks import run_ranks


def positional(made: Any, given: dict[str, Any]) -> Any:
    return made(given.pop("input_ids"), **given).loss


def embedded(made: Any, given: dict[str, Any]) -> Any:
    return made(inputs_embeds=made.get_input_embeddings()(given.pop("input_ids")), **given).loss


def shifted(made: Any, given: dict[str, Any]) -> Any:
    targets = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return made(shift_labels=targets, **given).loss


def two_at_once(made: Any, given: dict[str, Any]) -> Any:
    """Go backward through two micro-batches after both went forward: layers are recomputed with their own masks."""
    return made(**given).loss + made(**sequences.packed()).loss


def checkpointed(kind: str, reentrant: bool, **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        made = sequences.model(kind, **changes)
        tiny.checkpoint(made, reentrant)
        return made

    return make


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(sequences.model(), settings)


def chunked() -> Any:
    from torchturbo.objectives import chunked as objective

    made = sequences.model()
    objective.install(made, 3)
    return made


WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager", **WINDOWS}
SOFTCAP = {"attn_implementation": "eager", "query_pre_attn_scalar": 8, **WINDOWS}

CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], Any]] = {
    "plain": (sequences.model, sequences.batch(length=16), None),
    "length that does not divide": (sequences.model, sequences.batch(), None),
    "length of one": (sequences.model, sequences.batch(length=3, prompt=1), None),
    "eager": (lambda: sequences.model(attn_implementation="eager"), sequences.batch(), None),
    "norms of queries and keys": (lambda: sequences.model("qwen3"), sequences.batch(), None),
    "one kv head": (lambda: sequences.model(num_key_value_heads=1), sequences.batch(), None),
    "one kv head, eager": (
        lambda: sequences.model(num_key_value_heads=1, attn_implementation="eager"),
        sequences.batch(),
        None,
    ),
    "three kv heads": (
        lambda: sequences.model(hidden_size=48, num_attention_heads=12, num_key_value_heads=3, head_dim=4),
        sequences.batch(),
        None,
    ),
    "padded left": (sequences.model, sequences.padded(left=True), None),
    "padded right": (sequences.model, sequences.padded(left=False), None),
    "padded left, eager": (
        lambda: sequences.model(attn_implementation="eager"),
        sequences.padded(left=True),
        None,
    ),
    "packed": (sequences.model, sequences.packed(), None),
    "packed, eager": (lambda: sequences.model(attn_implementation="eager"), sequences.packed(), None),
    "packed, but no documents looked for": (lambda: sequences.model("gpt_oss", **SINKS), sequences.packed(), None),
    "ready mask": (sequences.model, sequences.ready(), None),
    "ready mask for each head": (sequences.model, sequences.ready(4), None),
    "ready mask, added": (
        lambda: sequences.model(attn_implementation="eager"),
        sequences.ready(4, added=True),
        None,
    ),
    "window": (lambda: sequences.model("mistral", sliding_window=4), sequences.batch(), None),
    "window, packed": (lambda: sequences.model("mistral", sliding_window=4), sequences.packed(), None),
    "window, padded": (lambda: sequences.model("mistral", sliding_window=4), sequences.padded(left=True), None),
    "window in some layers": (lambda: sequences.model("qwen3", use_sliding_window=True, **WINDOWS), sequences.batch(), None),
    "window, cap": (lambda: sequences.model("gemma2", **SOFTCAP), sequences.padded(left=True), None),
    "sinks": (lambda: sequences.model("gpt_oss", **SINKS), sequences.batch(), None),
    "latent attention": (sequences.mla, sequences.padded(left=False), None),
    "experts": (lambda: sequences.model("qwen3_moe"), sequences.packed(), None),
    "learned positions": (
        lambda: sequences.model("gpt2", n_embd=32, n_head=4, n_layer=2, max_position_embeddings=sequences.LENGTH, resid_pdrop=0.0,
                                attn_pdrop=0.0, embd_pdrop=0.0),
        sequences.batch(),
        None,
    ),
    "a part without a target": (sequences.model, sequences.batch(prompt=9), None),
    "checkpointed": (checkpointed("llama", False), sequences.padded(left=True), None),
    "checkpointed, reentrant": (checkpointed("mistral", True, sliding_window=4), sequences.packed(), None),
    "two micro-batches at once": (checkpointed("llama", False), sequences.padded(left=True), two_at_once),
    "positional": (sequences.model, sequences.batch(), positional),
    "embedded": (sequences.model, sequences.batch(), embedded),
    "labels shifted already": (sequences.model, sequences.batch(prompt=4), shifted),
    "adapters": (lora, sequences.padded(left=False), None),
    "chunked loss": (chunked, sequences.batch(prompt=2), None),
}  # fmt: skip
FOUR = ("plain", "one kv head", "packed", "padded left", "a part without a target", "sinks", "latent attention")


def measure(rank: int, names: list[str]) -> dict[str, dict[str, float]]:
    found = {}
    for name in names:
        make, given, loss_of = CASES[name]
        made = make()
        base = made.get_base_model() if hasattr(made, "get_base_model") else None
        found[name] = sequences.errors(made, given, base, loss_of)
    return found


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return run_ranks(2, measure, list(CASES))


@pytest.fixture(scope="module")
def four() -> list[Any]:
    return run_ranks(4, measure, list(FOUR))


def assert_small(found: dict[str, float]) -> None:
    assert {} == {name: error for name, error in found.items() if not error <= parity.TOLERANCE}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(name: str, two: list[Any]) -> None:
    for found in two:
        assert_small(found[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_compute_what_one_does(name: str, four: list[Any]) -> None:
    """With two key-value heads and one; some ranks have padding alone."""
    for found in four:
        assert_small(found[name])
