"""Tiny models with heads for multi-token prediction, and the slow oracle of their losses, in any number format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchturbo.objectives.heads import attach
from torchturbo.objectives.mtp.families import find
from torchturbo.objectives.mtp.objective import MultiTokenPrediction
from torchturbo.objectives.normalise import Normaliser

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip
SHARED = EXPERTS | LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 24}
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": ROUTED | LATENT | {"head_dim": 8},
    "glm4_moe": ROUTED | {"head_dim": 8, "num_key_value_heads": 2},
    "glm4_moe_lite": ROUTED | LATENT | {"q_lora_rank": 8},
    "deepseek_v32": ROUTED | LATENT | {"q_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16},
    "glm_moe_dsa": ROUTED | LATENT | {"q_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16},
    "mellum": EXPERTS
    | {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_mtp_layers": 1,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3_next": SHARED | {"decoder_sparse_step": 1},
    "qwen3_5_text": LINEAR | {"mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": SHARED | {"mtp_num_hidden_layers": 1},
}
"""What each family needs beside the sizes."""


def config(kind: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model of a family, by its model type."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(SIZES | SETTINGS[kind] | changes))


def model(kind: str = "deepseek_v3", seed: int = 0, **changes: Any) -> Any:
    """Return a random tiny model of a family, without heads: the engine builds them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(kind, **changes))


def headed(kind: str = "deepseek_v3", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return a tiny model with its heads, outside of an engine: that one computes in no more than fp32."""
    made = model(kind, **changes)
    made.config.get_text_config()._experts_implementation = "eager"  # the grouped product has no float64
    planned = find(made, None)
    assert planned is not None and planned.build is not None, planned
    attach(made, planned.build(made))
    torch.manual_seed(1)
    with torch.no_grad():
        for module in made.mtp.modules():
            made._init_weights(module)
    return made.to(dtype).train()


class Found(NamedTuple):
    """What one window of micro-batches gave."""

    loss: Tensor
    depths: tuple[float, ...]
    """The unweighted loss of each depth."""
    gradients: dict[str, Tensor]


@contextmanager
def objective(made: Any, weight: float) -> Iterator[tuple[Normaliser, MultiTokenPrediction]]:
    """Put normaliser and objective into a model for this block."""
    normaliser = Normaliser()
    normaliser.install(made, made)
    task = MultiTokenPrediction(made, made, made.mtp)
    normaliser.terms += task.terms(weight)
    try:
        yield normaliser, task
    finally:
        task.taps.remove()
        Normaliser.remove(made)


def fast(made: Any, window: Sequence[Mapping[str, Tensor]], weight: float) -> Found:
    """Run a window through the objective."""
    made.zero_grad()
    with objective(made, weight) as (normaliser, _):
        normaliser.open_window(window, torch.device("cpu"))
        with normaliser.applied():
            losses = [made(**batch, use_cache=False).loss for batch in window]
        total = torch.stack(losses).sum()
        total.backward()  # type: ignore[no-untyped-call]
        metrics = normaliser.term_metrics(1, torch.device("cpu"))
    return Found(total.detach(), tuple(metrics.values()), _gradients(made))


def _gradients(made: Any) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in made.named_parameters() if one.grad is not None}


# ---- the oracle ----


def slow(made: Any, window: Sequence[Mapping[str, Tensor]], weight: float) -> Found:
    """Compute the same by loops over documents and positions, with own calls of every layer and a plain softmax."""
    made.zero_grad()
    depths = made.mtp.depths
    main: list[Tensor] = []
    ahead: list[list[Tensor]] = [[] for _ in range(depths)]
    for batch in window:
        for hidden, ids, labels in _documents(made, batch):
            main += _losses(made, hidden, labels, 1)
            for k in range(1, depths + 1):
                hidden = _depth(made, k, hidden, ids)
                ahead[k - 1] += _losses(made, hidden, labels, k + 1)
    means = [torch.stack(losses).mean() for losses in ahead]
    total = torch.stack(main).mean() + weight * torch.stack(means).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return Found(total.detach(), tuple(float(mean.detach()) for mean in means), _gradients(made))


def _documents(made: Any, batch: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield hidden states, tokens and labels of each document, without padding."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    states = made.get_decoder()(**inputs, use_cache=False).last_hidden_state
    for row in range(len(states)):
        found = states[row], batch["input_ids"][row], batch["labels"][row]
        if "attention_mask" in batch:
            real = batch["attention_mask"][row].bool()
            found = found[0][real], found[1][real], found[2][real]
        starts = [0]
        if "position_ids" in batch:
            starts = batch["position_ids"][row].eq(0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], len(found[0])], strict=True):
            yield found[0][start:stop], found[1][start:stop], found[2][start:stop]


def _depth(made: Any, k: int, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the normed states of depth k, one for each position that has a token k further."""
    decoder, heads = made.get_decoder(), made.mtp
    join, layer, norm = (
        heads.joins[(k - 1) % len(heads.joins)],
        heads.layers[k - 1],
        heads.norms[(k - 1) % len(heads.norms)],
    )
    length = len(ids) - k
    if length <= 0:
        return hidden[:0]
    joined = []
    for i in range(length):
        embedded = made.get_input_embeddings()(ids[i + k])
        both = torch.cat([join.enorm(embedded), join.hnorm(hidden[i])])
        joined.append(join.eh_proj.weight @ both)
    states = torch.stack(joined)[None]
    at = torch.arange(k, length + k)[None]  # the rolled positions
    mask = torch.ones(length, length).tril().bool()
    kinds = getattr(decoder.config, "mtp_layer_types", None) or ()
    if "sliding_attention" in kinds:
        mask &= torch.ones(length, length).triu(1 - decoder.config.sliding_window).bool()
    rotations = decoder.rotary_emb(states, at, *kinds[:1])
    left = layer(states, position_embeddings=rotations, attention_mask=mask[None, None], position_ids=at)
    result: Tensor = norm(left[0] if isinstance(left, tuple) else left)[0]
    return result


def _losses(made: Any, hidden: Tensor, labels: Tensor, ahead: int) -> list[Tensor]:
    """Return the cross-entropy at each position whose target, so many tokens ahead, counts."""
    losses = []
    for i in range(len(hidden)):
        if i + ahead < len(labels) and labels[i + ahead] != -100:
            logits = made.lm_head.weight @ hidden[i]
            losses.append(torch.log(torch.exp(logits - logits.max()).sum()) + logits.max() - logits[labels[i + ahead]])
    return losses


# ---- micro-batches ----


def batch(lengths: Sequence[int] = (12, 9), seed: int = 3, masked: int = 2) -> dict[str, Tensor]:
    """Return rows of different lengths, padded on the right, whose first tokens are a prompt without targets."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.stack([torch.arange(longest) < length for length in lengths])
    labels = ids.masked_fill(~mask, -100)
    labels[:, :masked] = -100
    return {"input_ids": ids.masked_fill(~mask, 0), "labels": labels, "attention_mask": mask.long()}


def packed(*rows: Sequence[int], seed: int = 4) -> dict[str, Tensor]:
    """Return rows of documents of these lengths, with positions that restart, and a target at each token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(rows), sum(rows[0])), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far each gradient is from what it should be, relative to its size, or to a thousandth of all."""
    assert expected.keys() == found.keys()
    floor = 1e-3 * max(float(value.norm()) for value in expected.values())
    return {
        name: float((found[name] - value).norm() / max(float(value.norm()), floor)) for name, value in expected.items()
    }
