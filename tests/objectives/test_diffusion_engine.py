"""Block diffusion in the engine: one process against the formula, every mesh and saver against one process."""

from __future__ import annotations

from typing import Any

import diffusing
import parity
import pytest
import torch
from diffusing import noise, packed, ragged, rows
from ranks import run_ranks
from torch.nn import functional

from torchturbo.errors import ConfigError
from torchturbo.objectives.diffusion.mask import attention_mask, doubled_rule
from torchturbo.objectives.diffusion.models import is_diffusion_model
from torchturbo.objectives.diffusion.noise import DOUBLED, Doubled

CAP = 2.0


def settings(**sections: Any) -> Any:
    return parity.config(**({"diffusion": {"bd_block_size": diffusing.BLOCK, "cap_lambda": CAP}} | sections))


def sure(seed: int = 0, kind: str = "qwen3") -> Any:
    """Return a model that is right about a part of what is hidden: it says token 7 in most places."""
    model = diffusing.model(kind, seed=seed)
    with torch.no_grad():
        model.lm_head.weight[7] += 0.3 * torch.sign(model.model.norm.weight)
        model.lm_head.weight.mul_(4)
    return model


def window(count: int = 4, divisor: int = 1) -> list[dict[str, Any]]:
    """Return doubled micro-batches of unequal counts, many of whose labels are token 7; the last one has none."""
    given = [rows(2, 12), ragged([12, 5]), packed([6, 5, 9]), ragged([4, 9])]
    for at, batch in enumerate(given):
        often = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(at)) < 0.5
        for name in ("input_ids", "labels"):
            batch[name] = torch.where(often & batch["labels"].ne(-100), 7, batch[name])
    made = [noise(divisor=divisor)(batch, at) for at, batch in enumerate(given)]
    for name in ("labels", "shift_labels"):
        made[count - 1][name][:] = -100
    return made[:count]


def formula(model: Any, batches: list[dict[str, Any]]) -> parity.Step:
    """Return a step by the formula: the mean over all hidden tokens, and CAP's mean over micro-batches."""
    model = model.train()
    count = sum(int(batch["labels"].ne(-100).sum()) for batch in batches)
    total, caps = torch.zeros(()), []
    for batch in batches:
        length = batch[DOUBLED].length
        rule = doubled_rule(batch["attention_mask"], length, diffusing.BLOCK)
        device, ids = torch.device("cpu"), batch["input_ids"]
        mask = attention_mask("sdpa", rule, len(ids), 2 * length, torch.float32, device)
        values = model(input_ids=ids, attention_mask=mask, position_ids=batch["position_ids"]).logits[:, :length]
        hidden = batch["labels"].ne(-100)
        target = batch["labels"][hidden]
        total = total + functional.cross_entropy(values[hidden], target, reduction="sum") / count
        logs = values[hidden].log_softmax(-1)
        right = logs[logs.argmax(-1) == target]
        caps.append(-(right.exp() * right).sum() / max(1, len(right)))
    loss = total + CAP * torch.stack(caps).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients.values()]))
    return parity.Step(float(loss.detach()), float(norm), gradients)


def test_one_process_is_the_formula() -> None:
    """Micro-batches of unequal counts, one of them without any: accumulation weighs tokens, and CAP micro-batches."""
    batches = window()
    expected = formula(sure(), batches)
    model = sure()
    engine = parity.prepared(model, settings())
    found = parity.step(engine, model, batches)
    parity.assert_equal(found, expected)
    cap = engine.context.normaliser.term_metrics(1, torch.device("cpu"))["cap_loss"]
    assert cap > 0.1


def test_a_mixture_is_the_formula_and_router_losses_leave_padding_out() -> None:
    """Beside Switch's loss, whose routers see both halves and no padding."""
    balanced = {"moe": {"aux_loss_coeff": 0.1}}
    values = []
    for batches in (window(), [wider(batch) for batch in window()]):
        model = sure(kind="qwen3_moe")
        values.append(parity.step(parity.prepared(model, settings(**balanced)), model, batches))
    parity.assert_equal(values[1], values[0])
    plain = formula(sure(kind="qwen3_moe"), window())
    assert values[0].loss > plain.loss + 0.1


def wider(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a doubled batch with two more blocks of padding in each half."""
    length, more = batch[DOUBLED].length, 2 * diffusing.BLOCK
    fillers = {"labels": -100, "shift_labels": -100}
    made: dict[str, Any] = {DOUBLED: Doubled(length + more, diffusing.BLOCK, whole=False)}
    for name, value in batch.items():
        if name != DOUBLED:
            halves = value.split(length, 1)
            made[name] = torch.cat([functional.pad(half, (0, more), value=fillers.get(name, 0)) for half in halves], 1)
    return made


SAVERS: dict[str, dict[str, Any]] = {
    "chunks": {"loss_chunk": {"enabled": True, "chunk_size": 5}},
    "checkpointing": {"activation_checkpointing": {"enabled": True}},
    "reentrant": {"activation_checkpointing": {"enabled": True, "use_reentrant": True}},
}


@pytest.mark.parametrize("saver", list(SAVERS))
def test_memory_savers_change_nothing(saver: str) -> None:
    """Beside CAP."""
    plain, model = sure(), sure()
    expected = parity.step(parity.prepared(plain, settings()), plain, window())
    found = parity.step(parity.prepared(model, settings(**SAVERS[saver])), model, window())
    parity.assert_equal(found, expected)


def compared(rank: int, world_size: int, sections: list[dict[str, Any]], kind: str = "qwen3") -> None:
    """Hold steps on this rank against one process, one for each configuration."""
    plain = sure(kind=kind)
    expected = parity.step(parity.prepared(plain, settings()), plain, window())
    for more in sections:
        config = settings(**more)
        sp_size = config.parallel_plan.sp_size
        model = sure(kind=kind)
        engine = parity.prepared(model, config, world_size, rank)
        mine = parity.share(window(), world_size, sp_size, rank)
        parity.assert_equal(parity.step(engine, model, mine), expected)


def in_bf16(rank: int, world_size: int) -> list[float]:
    """Return the losses of a step in bf16 under every attention that adds its mask, on this rank."""
    losses = []
    for kind in ("sdpa", "eager"):
        model = sure()
        model.set_attn_implementation(kind)
        engine = parity.prepared(model, settings(mixed_precision="bf16"), world_size, rank)
        losses.append(parity.step(engine, model, parity.share(window(), world_size, 1, rank)).loss)
    return losses


@pytest.mark.full
def test_bf16_is_near() -> None:
    """Under autocast, and as FSDP2 gathers: masks have the format of the scores."""
    plain = sure()
    expected = parity.step(parity.prepared(plain, settings()), plain, window()).loss
    for losses in (in_bf16(0, 1), *run_ranks(2, in_bf16, 2)):
        assert losses == pytest.approx([expected] * 2, rel=2e-2)


SP = {"parallel_plan": {"sp_size": 2}}


def test_two_ranks_are_one_process() -> None:
    """FSDP2 with unequal counts and a rank without a target; sequence parallelism; each with chunks and recomputation."""
    both = SAVERS["chunks"] | SAVERS["checkpointing"]
    run_ranks(2, compared, 2, [{}, both, SP, SP | both])


def test_llada2_on_two_ranks_is_one_process() -> None:
    """Divided experts, and shared sequences, of the one family that is known by its type."""
    run_ranks(2, compared, 2, [{"parallel_plan": {"ep_size": 2}}, SP], "llada2_moe")


@pytest.mark.full
def test_four_ranks_are_one_process() -> None:
    """Two groups of two ranks."""
    run_ranks(4, compared, 4, [{}, SP, SP | SAVERS["chunks"]])


def test_adapters_are_trained_and_nothing_else() -> None:
    """LoRA: PEFT's model is the one that is called; at its start it computes what its base computes."""
    from peft import LoraConfig, get_peft_model

    plain = sure()
    expected = parity.step(parity.prepared(plain, settings()), plain, window())
    model = get_peft_model(sure(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    found = parity.step(parity.prepared(model, settings()), model, window())
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert {"lora_A", "lora_B"} == {name.split(".")[-3] for name in found.gradients}


# ---- off, and refused ----


def test_without_cap_nothing_of_it_is_there() -> None:
    """Bit for bit the step without the key: 0 is its default."""
    results = []
    for sections in ({"diffusion": {"bd_block_size": 4, "cap_lambda": 0.0}}, {"diffusion": {"bd_block_size": 4}}):
        model = sure()
        engine = parity.prepared(model, settings(**sections))
        assert [] == engine.context.normaliser.terms
        results.append(parity.step(engine, model, window()))
    assert results[0].loss == results[1].loss
    assert all(torch.equal(value, results[1].gradients[name]) for name, value in results[0].gradients.items())


def test_a_released_model_is_plain_again() -> None:
    """No hook is left, and its loss is its own."""
    model = sure()
    hooks, loss = len(model._forward_pre_hooks), model.loss_function
    parity.prepared(model, settings()).release(model)
    assert (hooks, loss) == (len(model._forward_pre_hooks), model.loss_function)


def problems(model: Any, **sections: Any) -> list[str]:
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    return [str(problem) for problem in Engine(settings(**sections), Context()).problems(model)]


def router_loss() -> Any:
    return diffusing.model("qwen3_moe", output_router_logits=True)


def flash() -> Any:
    model = diffusing.model()
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def windows() -> Any:
    return diffusing.model(layer_types=["full_attention", "sliding_attention"], use_sliding_window=True)


def own_loss() -> Any:
    model = diffusing.model()
    model.loss_function = lambda *args, **kwargs: None
    return model


def half_said() -> Any:
    return diffusing.model(is_diffusion_model="true")


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no yes": (half_said, {}, "is_diffusion_model is 'true' in its config.json, expected true or false"),
    "flash attention": (flash, {}, "flash_attention_2 can't express the mask of block diffusion; use sdpa"),
    "windows": (windows, {}, "layers of sliding_attention, which see less than"),
    "router loss": (router_loss, {}, "a router loss of its own (output_router_logits) that takes no 4-D mask"),
    "own loss": (own_loss, {}, "computes a loss of its own"),
    "next tokens": (diffusing.model, {"mtp": {"enabled": True}}, "mtp.enabled: a diffusion model predicts the tokens"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_can_not_be_trained_so_is_refused(case: str) -> None:
    """Before a weight is read: with the reason and a remedy."""
    make, sections, told = REFUSED[case]
    found = problems(make(), **sections)
    assert any(told in line and ";" in line for line in found), found


def test_a_model_that_is_none_is_left_alone_and_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    """One warning for each key that was set, with its place; nothing is installed."""
    import tiny

    model = tiny.model("qwen3")
    hooks = len(model._forward_pre_hooks)
    parity.prepared(model, parity.config(diffusion={"cap_lambda": 2.0, "bd_block_size": 8}))
    lines = [line for line in capsys.readouterr().err.splitlines() if "set but not read" in line]
    assert ["cap_lambda", "bd_block_size"] == [line.split("diffusion.")[1].split(":")[0] for line in lines]
    assert all("parity.json:1:" in line for line in lines)
    assert hooks == len(model._forward_pre_hooks)

    parity.prepared(tiny.model("qwen3"), parity.config())
    assert "set but not read" not in capsys.readouterr().err


def test_a_problem_of_a_model_has_its_place() -> None:
    """Where it was found."""
    model = windows()
    model.config.name_or_path = "some/model"
    assert all(line.startswith("some/model: ") for line in problems(model))


def test_a_class_is_told_by_its_configuration() -> None:
    """A LLaDA2 whose configuration says that it is none is trained on the next token."""
    model = diffusing.model("llada2_moe", is_diffusion_model=False)
    assert type(model).is_diffusion_model
    hooks = len(model._forward_pre_hooks)
    parity.prepared(model, parity.config()).release(model)
    assert hooks == len(model._forward_pre_hooks)
    assert not is_diffusion_model(model) and not is_diffusion_model(model.config)


def test_noise_that_hides_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, as the run begins."""
    parity.prepared(diffusing.model(), settings(diffusion={"bd_mask_low": 0.0, "bd_mask_high": 0.0}))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "hides no token" in line]
    assert "diffusion.bd_mask_high: 0 hides no token" in line
    parity.prepared(diffusing.model(), settings(diffusion={"bd_mask_low": 0.0}))
    assert "hides no token" not in capsys.readouterr().err


def test_a_model_that_says_it_is_none_is_trained_on_the_next_token() -> None:
    """Whatever its type."""
    model = diffusing.model(is_diffusion_model=False)
    assert problems(model, mtp={"enabled": False}) == []
    engine = parity.prepared(model, parity.config())
    assert float(parity.step(engine, model, parity.batches(1)).loss) > 0


def test_settings_that_apply_refuses_too() -> None:
    """Whoever prepares a model without asking first."""
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine

    with pytest.raises(ConfigError):
        Engine(settings(), Context()).prepare(windows())
