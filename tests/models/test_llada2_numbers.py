"""LLaDA2-MoE against the same model written out in loops, and what its forward takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.models import llada2_tiny as llada2
from tests.models.llada2_oracle import Oracle
from torchturbo.models.llada2.modeling import LLaDA2MoeTopkRouter

WITHIN = 1e-6
SMALL = {"hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 8, "vocab_size": 20, "head_dim": 8}
IN_LOOPS = {"experts_implementation": "eager"}
"""torch's grouped products, which Transformers uses as a rule, know no float64."""
CASES: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "eager": {"attn_implementation": "eager"},
    "tied, with biases": {"tie_word_embeddings": True, "use_bias": True, "use_qkv_bias": True},
    "no shared expert": {"num_shared_experts": None, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
    "scores as they are": {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    "one expert": {"num_experts_per_tok": 1, "num_key_value_heads": 4, "rope_theta": 100},
}


def inputs(length: int = 7, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Return tokens [B, S] and which pairs attend [B, 1, S, S]: each token itself, and others on both sides."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 20, (rows, length), generator=generator)
    allowed = torch.rand(rows, 1, length, length, generator=generator) > 0.4
    return ids, allowed | torch.eye(length, dtype=torch.bool)


def additive(allowed: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm().clamp(min=1e-12)).detach())


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_one_written_out(case: str) -> None:
    """Logits, and the gradient of every tensor, in float64."""
    model = llada2.model(**(SMALL | IN_LOOPS | CASES[case])).double()
    ids, allowed = inputs()
    weights = torch.randn(*ids.shape, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    named = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    tensors = {
        name: tensor.clone().requires_grad_(not name.endswith("expert_bias"))
        for name, tensor in llada2.apart(named).items()
    }
    oracle = Oracle(tensors, model.config)
    expected = torch.stack(
        [oracle.logits(row, seen[0]) for row, seen in zip(ids.tolist(), allowed.tolist(), strict=True)]
    )
    (expected * weights).sum().backward()
    logits = model(ids, attention_mask=additive(allowed)).logits
    (logits * weights).sum().backward()
    gradients = llada2.apart({name: weight.grad for name, weight in model.named_parameters()})
    rotary = SMALL["head_dim"] * model.config.partial_rotary_factor

    assert rotary == model.config.rotary_dim
    assert error(logits, expected) < WITHIN
    for name, gradient in gradients.items():
        reference = tensors[name].grad
        assert error(gradient, torch.zeros_like(gradient) if reference is None else reference) < WITHIN, name
    assert {name for name, tensor in tensors.items() if tensor.requires_grad} - gradients.keys() <= {"lm_head.weight"}


def test_a_router_chooses_by_groups_and_weighs_without_the_bias() -> None:
    """By hand: 8 experts in 4 groups, of which 2 count; logits, weights and indices in this order, as in Transformers."""
    router = LLaDA2MoeTopkRouter(llada2.model(**SMALL, num_experts_per_tok=2).config).double()
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([4.0, -9.0, 1.0, 1.0, 0.5, 2.0, -1.0, -1.0])
        router.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.35]))
    state = torch.zeros(1, 16, dtype=torch.float64)
    state[0, 0] = 1
    logits, weights, indices = router(state)
    # Best pairs of sigmoids: 0.98 + 0.00, 0.73 + 0.73, 0.62 + 0.88, 0.62 (with its bias) + 0.27: groups 1 and 2.
    score = torch.tensor([2.0, 1.0], dtype=torch.float64).sigmoid()

    assert torch.equal(router.weight[:, 0][None], logits)
    assert [5] == indices[0, :1].tolist()
    assert indices[0, 1].item() in (2, 3)
    torch.testing.assert_close(score / score.sum() * 2.5, weights[0])

    with torch.no_grad():
        router.expert_bias[2] = 0.3  # moves the choice, not the weights
    _, moved, chosen = router(state)

    assert [2, 5] == chosen[0].tolist()
    torch.testing.assert_close(weights[0].flip(0), moved[0])


def test_grouped_products_give_what_loops_give() -> None:
    """What Transformers takes as a rule against one expert after the other, in float32."""
    ids, allowed = inputs()
    found, expected = (
        llada2.model(**SMALL, experts_implementation=name)(ids, attention_mask=allowed).logits
        for name in ("grouped_mm", "eager")
    )

    torch.testing.assert_close(expected, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_without_a_mask_every_token_sees_all_others(implementation: str) -> None:
    model = llada2.model(**SMALL, attn_implementation=implementation).eval()
    ids, _ = inputs()
    changed, padded = ids.clone(), torch.ones_like(ids)
    changed[:, -1] = (ids[:, -1] + 3) % 19 + 1
    padded[:, -1] = 0
    with torch.no_grad():
        plain, other = model(ids).logits, model(changed).logits
        hidden, also = (model(given, attention_mask=padded).logits for given in (ids, changed))
        shorter = model(ids[:, :-1]).logits

    assert (plain - other)[:, 0].abs().max() > 1e-3
    torch.testing.assert_close(hidden[:, :-1], also[:, :-1])
    torch.testing.assert_close(hidden[:, :-1], shorter)


def test_a_layer_by_itself_attends_to_both_sides_too() -> None:
    """As further heads call it: Transformers tells layers inside the model, by a keyword of its own."""
    model = llada2.model(**SMALL).eval()
    states = torch.randn(1, 5, 16)
    changed = states.clone()
    changed[:, -1] += 1
    rotary = model.model.rotary_emb(states, torch.arange(5)[None])
    with torch.no_grad():
        plain, other = (model.model.layers[0](given, position_embeddings=rotary) for given in (states, changed))

    assert (plain - other)[:, 0].abs().max() > 1e-3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_of_pairs_is_taken_in_every_form(implementation: str) -> None:
    """Bool, or added to the scores, for each row or for all, and of another format than the model's."""
    model = llada2.model(**SMALL, attn_implementation=implementation).eval()
    ids, allowed = inputs()
    with torch.no_grad():
        expected = model(ids, attention_mask=additive(allowed, torch.float32)).logits
        free = model(ids).logits
        bool_mask = model(ids, attention_mask=allowed).logits
        alone = model(ids[:1], attention_mask=allowed[:1]).logits
        wide = model.bfloat16()(ids, attention_mask=additive(allowed, torch.float32)).logits
        bool_wide = model(ids, attention_mask=allowed).logits

    assert (expected - free).abs().max() > 1e-2
    torch.testing.assert_close(expected, bool_mask)
    torch.testing.assert_close(expected[:1], alone)
    torch.testing.assert_close(bool_wide, wide)
    assert wide.isfinite().all()


def test_a_mask_has_the_format_of_the_states_and_stays_finite() -> None:
    """The least number of float32 is minus infinity in bf16, and a token that sees nothing would make no number."""
    model = llada2.model(**SMALL).bfloat16().eval()
    ids, allowed = inputs()
    allowed[0, 0, 2] = False
    seen: list[Tensor] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        logits = model(ids, attention_mask=additive(allowed, torch.float32)).logits

    assert torch.bfloat16 == seen[0].dtype
    assert seen[0].isfinite().all()
    assert logits.isfinite().all()


def test_flex_attention_gets_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BlockMask goes through as it is, and pairs as numbers that are added to the scores."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
    from transformers.integrations import flex_attention as integration

    def uncompiled(*given: Any, training: bool, **more: Any) -> Any:
        return flex_attention(*given, **more)

    model = llada2.model(**SMALL).eval()
    ids, allowed = inputs()
    with torch.no_grad():
        expected = model(ids, attention_mask=allowed).logits
        model.set_attn_implementation("flex_attention")
        # Compiled, it would take most of a minute; this is the same function.
        monkeypatch.setattr(
            integration,
            "compile_friendly_flex_attention",
            uncompiled,
        )
        blocks = create_block_mask(
            lambda row, head, query, key: allowed[row, 0, query, key], 2, None, 7, 7, device="cpu"
        )
        assert isinstance(blocks, BlockMask)
        found = [model(ids, attention_mask=mask).logits for mask in (blocks, allowed, additive(allowed, torch.float32))]

    for logits in found:
        torch.testing.assert_close(expected, logits, rtol=1e-4, atol=1e-5)


def test_labels_are_shifted_unless_shifted_labels_are_given() -> None:
    model = llada2.model(**SMALL)
    ids, allowed = inputs()
    labels = ids.clone()
    labels[:, :3] = -100
    logits = model(ids, attention_mask=allowed).logits.flatten(0, 1)
    shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]

    def summed(targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum")

    def loss(**given: Any) -> Tensor:
        return model(ids, attention_mask=allowed, labels=labels, **given).loss

    torch.testing.assert_close(summed(shifted) / 8, loss())
    torch.testing.assert_close(summed(labels) / 8, loss(shift_labels=labels))
    torch.testing.assert_close(summed(labels) / 5, loss(shift_labels=labels, num_items_in_batch=5))


def test_a_forward_records_what_it_is_asked_for() -> None:
    model = llada2.model(**SMALL, attn_implementation="eager")
    ids, _ = inputs()
    output = model(ids, output_router_logits=True, output_hidden_states=True, output_attentions=True, logits_to_keep=1)

    assert [(14, 8)] * 2 == [tuple(logits.shape) for logits in output.router_logits]
    assert 4 == len(output.hidden_states)
    assert [(2, 4, 7, 7)] * 3 == [tuple(weights.shape) for weights in output.attentions]
    assert (2, 1, 20) == output.logits.shape
    assert "router_logits" not in model(ids)


def test_what_a_forward_does_not_take_is_refused() -> None:
    model = llada2.model(**SMALL)
    ids, _ = inputs()
    with pytest.raises(ValueError, match="one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="attends to both sides"):
        model(ids, is_causal=True)


def test_the_router_computes_in_float32_under_autocast() -> None:
    """Scores rounded to bf16 would send tokens to other experts."""
    model = llada2.model(**SMALL).model.layers[1].mlp.gate
    states = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        logits, weights, _ = model(states)

    assert torch.float32 == logits.dtype == weights.dtype
    assert torch.equal(states @ model.weight.T, logits)
