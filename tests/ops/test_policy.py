"""The choice on every device, its table, and what an insisting policy lacks; devices and packages are stand-ins."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import stand_ins
import tiny
import torch
from stand_ins import Device

from torchturbo.ops import policy
from torchturbo.ops.policy import AUTO, CUSTOM, Situation
from torchturbo.ops.replace import innermost


def situation(model: Any, device: str, dtype: str = "bfloat16", **rest: Any) -> Situation:
    return Situation(model, Device(device), dtype, **rest)


def names(model: Any, device: str, chosen: str = AUTO, dtype: str = "bfloat16", **rest: Any) -> dict[str, str]:
    choices = policy.plan(situation(model, device, dtype, **rest), chosen)
    return {choice.op: choice.name for choice in choices}


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every compiler be there."""
    monkeypatch.setattr("torchturbo.ops.registry.Implementation._missing_tool", lambda self: None)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FlashAttention be there, also for Transformers' own check."""
    stand_ins.put(monkeypatch, "flash_attn", flash_attn_func=1, flash_attn_varlen_func=1)
    from transformers import PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda self, **_: True)


OWN = "sdpa, as the model has it"


def test_auto_on_a_cpu_keeps_the_model_but_for_experts_in_autocast() -> None:
    """Compiling isn't repaid in a short run; Transformers' grouped product leaves autocast, ours doesn't."""
    native = dict.fromkeys(("rms_norm", "rope", "cross_entropy"), "native")
    model = tiny.model("qwen3_moe")

    assert {"attention": OWN, **native, "grouped_mm": "grouped_mm, as the model has it"} == names(
        model, "cpu", dtype="float32"
    )
    assert {"attention": OWN, **native, "grouped_mm": "grouped_mm"} == names(model, "cpu")


def test_custom_on_a_cpu_compiles(compilers: None) -> None:
    expected = dict.fromkeys(("rms_norm", "rope", "swiglu", "cross_entropy"), "torch.compile")

    assert {"attention": OWN, **expected} == names(tiny.model(), "cpu", CUSTOM, "float32")


def test_a_gpu_with_everything(monkeypatch: pytest.MonkeyPatch, compilers: None, flash: None) -> None:
    """Liger where it has a kernel, FlashAttention in bf16 where nobody insists on the same bits."""
    stand_ins.liger_kernel(monkeypatch)
    expected = dict.fromkeys(("rms_norm", "rope", "swiglu", "cross_entropy"), "liger")
    model = tiny.model()

    assert {"attention": "flash_attention_2", **expected} == names(model, "cuda")
    assert {"attention": OWN, **expected} == names(model, "cuda", dtype="float32")
    assert {"attention": OWN, **expected} == names(model, "cuda", deterministic=True)


def test_block_diffusion_keeps_flash_attention_away(flash: None) -> None:
    """It can't express the mask: a choice of ours would train without one."""
    assert "flash_attention_2" == names(tiny.model("qwen3"), "cuda")["attention"]
    model = tiny.model("qwen3", is_diffusion_model=True)
    (attention,) = [one for one in policy.plan(situation(model, "cuda"), AUTO) if one.op == "attention"]
    assert OWN == attention.name
    assert "flash_attention_2: it can't express the mask of block diffusion" in attention.reasons


def test_an_npu_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.torch_npu(monkeypatch)
    from transformers import PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda self, **_: True)
    model = tiny.model("qwen3_moe")

    assert dict.fromkeys(("attention", "rms_norm", "rope", "grouped_mm", "cross_entropy"), "torch_npu") == names(
        model, "npu"
    )


def test_a_bare_gpu_stays_native_and_says_why(compilers: None) -> None:
    """The table names the package for each operator."""
    model = tiny.model()
    where = situation(model, "cuda")
    choices = policy.plan(where, AUTO)
    table = policy.table(choices, where, AUTO)

    assert "operators (auto, cuda, bfloat16)" == table.splitlines()[0]
    assert ["note 1:", "note 2:"] == [line[2:9] for line in table.splitlines() if "is not installed" in line]
    assert ["rms_norm", "native", "5", "note", "2"] == next(
        line for line in table.splitlines() if "rms_norm" in line
    ).split()
    assert "note 2: liger: liger_kernel.ops is not installed" in table and max(map(len, table.splitlines())) <= 100


def test_custom_lists_all_that_is_missing_and_what_installs_it(compilers: None) -> None:
    """One problem for each operator that would be plain PyTorch; attention has sdpa."""
    model = tiny.model()
    lacking = policy.missing(policy.plan(situation(model, "cuda"), CUSTOM), "cuda")

    assert ["rms_norm", "rope", "swiglu", "cross_entropy"] == [message.split()[2] for message, _ in lacking]
    assert {"install it: pip install liger-kernel"} == {remedy for _, remedy in lacking}
    assert all("liger: liger_kernel.ops is not installed" in message for message, _ in lacking)


def test_custom_where_nothing_can_be_installed() -> None:
    """The remedy is another policy."""
    lacking = policy.missing(policy.plan(situation(tiny.model(), "mps", "float32"), CUSTOM), "mps")

    assert ("no optimised rope for this run: there is none for mps", "set it to auto") in lacking


def test_what_a_model_hasnt_is_not_missed(compilers: None) -> None:
    """Gemma's MLP is no SwiGLU: nothing to optimise, one line in the table."""
    model = tiny.model("gemma3_text")
    choices = policy.plan(situation(model, "cpu", "float32"), CUSTOM)

    assert [] == policy.missing(choices, "cpu")
    assert "Gemma3MLP computes something else" in policy.table(choices, situation(model, "cpu"), CUSTOM)


def test_eager_that_somebody_chose_stays_under_auto() -> None:
    """Transformers' default is better, so it was chosen; custom overrules it."""
    model = tiny.model("qwen3_moe", attn_implementation="eager")
    model.set_experts_implementation("eager")
    chosen, insisted = (names(model, "cpu", which, "float32") for which in (AUTO, CUSTOM))

    assert ("native", "native") == (chosen["attention"], chosen["grouped_mm"])
    assert ("sdpa", "grouped_mm") == (insisted["attention"], insisted["grouped_mm"])
    where = situation(model, "cpu", "float32")
    assert "sdpa: the model was given eager" in policy.table(policy.plan(where, AUTO), where, AUTO)


def test_a_part_that_only_knows_eager_says_nothing_about_the_rest() -> None:
    """A vision tower comes before the language model, which has sdpa."""
    model = tiny.model()
    first = model.model.layers[0].self_attn
    first.config = copy.deepcopy(first.config)
    first.config._attn_implementation_internal = "eager"

    assert OWN == names(model, "cpu", CUSTOM, "float32")["attention"]


def test_another_implementation_that_somebody_chose_stays() -> None:
    """It is none of ours, and no plain one either."""
    model = tiny.model("qwen3_moe")
    model.set_experts_implementation("batched_mm")
    choices = policy.plan(situation(model, "cpu"), CUSTOM)

    assert "batched_mm, as the model has it" == names(model, "cpu", CUSTOM)["grouped_mm"]
    assert "grouped_mm" not in {message.split()[2] for message, _ in policy.missing(choices, "cpu")}


def test_the_chunked_loss_has_the_cross_entropy(compilers: None) -> None:
    """It computes head and loss in one; the operator gives way with a note, under custom too."""
    model = tiny.model()
    choices = policy.plan(situation(model, "cpu", "float32", chunked_loss=True), CUSTOM)
    last = choices[-1]

    assert ("cross_entropy", "chunked loss", None) == (last.op, last.name, last.implementation)
    assert [] == policy.missing(choices, "cpu")


def test_a_model_with_kernels_of_the_hub_keeps_them(monkeypatch: pytest.MonkeyPatch, compilers: None) -> None:
    """Transformers has put its own into the same places."""
    model = tiny.model()
    monkeypatch.setattr(model, "_use_kernels", True, raising=False)
    chosen = names(model, "cpu", CUSTOM, "float32")

    assert dict.fromkeys(("rms_norm", "rope", "swiglu"), "native") == {
        op: chosen[op] for op in ("rms_norm", "rope", "swiglu")
    }


@pytest.mark.parametrize(("device", "kind"), [("npu", "qwen3_moe"), ("cuda", "qwen3"), ("npu", "phi3")])
def test_a_whole_model_with_a_vendors_operators(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch, compilers: None
) -> None:
    """Loss and every gradient equal the native model's; afterwards it is the native model again."""
    stand_ins.torch_npu(monkeypatch)
    stand_ins.liger_kernel(monkeypatch)
    ids = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(ids % 5 == 0, -100)
    model, native = tiny.model(kind), tiny.model(kind)
    owned = [dict(vars(module)) for module in model.modules()]
    classes = {type(module): dict(vars(type(module))) for module in model.modules()}
    where = situation(model, device, "float32")
    choices = policy.plan(where, AUTO)
    if device == "npu" and kind == "qwen3_moe":  # in bf16 alone there; the stand-in computes in any format
        row = next(row for row in policy.registry.of("grouped_mm") if row.name == "torch_npu")
        choices = [replace(choice, implementation=row) if choice.op == "grouped_mm" else choice for choice in choices]
    policy.install(choices, where)
    assert owned != [dict(vars(module)) for module in model.modules()]

    found = model(input_ids=ids, labels=labels, use_cache=False)
    found.loss.backward()
    expected = native(input_ids=ids, labels=labels, use_cache=False)
    expected.loss.backward()
    torch.testing.assert_close(expected.loss, found.loss)
    torch.testing.assert_close(expected.logits, found.logits, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, atol=2e-6 * float(theirs.grad.abs().max()), rtol=1e-4)

    policy.remove(model)
    assert owned == [dict(vars(module)) for module in model.modules()]
    assert all(kept == dict(vars(kind)) for kind, kept in classes.items())


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_results_have_the_native_format_and_odd_calls_go_to_native_code(
    device: str, monkeypatch: pytest.MonkeyPatch, compilers: None
) -> None:
    """Under autocast heads are bf16 and weights and angles fp32: what comes out is what the next module expects."""
    stand_ins.torch_npu(monkeypatch)
    stand_ins.liger_kernel(monkeypatch)
    for kind in ("qwen3", "gemma3_text"):
        model = tiny.model(kind)
        where = situation(model, device, "float32")
        policy.install(policy.plan(where, AUTO), where)
        attention = model.model.layers[0].self_attn
        x = torch.randn(2, 5, 4, 8).bfloat16()
        expected, found = type(attention.q_norm).forward(attention.q_norm, x), attention.q_norm(x)
        assert expected.dtype == found.dtype
        torch.testing.assert_close(expected, found, atol=2e-2, rtol=2e-2)

    name = "apply_rotary_pos_emb"
    native, fast = (innermost(forward).__globals__[name] for forward in (type(attention).forward, attention.forward))
    assert native is not fast
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 8)
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q.bfloat16(), k.bfloat16(), angles.cos(), angles.sin()), {}),
        ((q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin()), {"unsqueeze_dim": 2}),
        ((q[..., :4], k[..., :4], angles[..., :1].cos(), angles[..., :1].sin()), {}),
        ((q[0], k[0], angles[0].cos(), angles[0].sin()), {"unsqueeze_dim": 0}),
    ]
    for arguments, words in cases[1:]:
        for theirs, ours in zip(native(*arguments, **words), fast(*arguments, **words), strict=True):
            assert torch.equal(theirs, ours)
    arguments, _ = cases[0]
    for theirs, ours in zip(native(*arguments), fast(*arguments), strict=True):
        assert theirs.dtype == ours.dtype == torch.float32
