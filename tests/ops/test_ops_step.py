"""The step: native touches nothing, auto tells one table, custom insists before weights, release undoes."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import stand_ins
import tiny
import torch

from torchturbo.engine import pipeline
from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import EngineConfig, build_from_args
from torchturbo.engine.engine import Context, Engine
from torchturbo.engine.steps import ops
from torchturbo.errors import ConfigError
from torchturbo.generated.keys import KEYS
from torchturbo.objectives.normalise import own_loss_function
from torchturbo.runtime.cpu import CpuRuntime

POLICY, CHUNKED = str(KEYS["ops.policy"].cli), str(KEYS["loss_chunk.enabled"].cli)
PLAIN = (str(KEYS["mixed_precision"].cli), "fp32")


class Gpu(CpuRuntime):
    """A CPU that says it is a GPU: with stand-ins for its packages everything computes here."""

    device_type = "cuda"


def config(*words: str) -> EngineConfig:
    return build_from_args(parse_torchturbo_args([*PLAIN, *words])[0])


def batch(seed: int = 0) -> dict[str, Any]:
    ids = torch.randint(3, 320, (2, 11), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 7 == 0, -100), "use_cache": False}


def owned(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Context:
    """Return the context of a GPU with Liger's stand-in."""
    stand_ins.liger_kernel(monkeypatch)
    monkeypatch.setattr("torchturbo.ops.registry.Implementation._missing_tool", lambda self: None)
    return Context(runtime=Gpu())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_native_is_the_unpatched_model_bit_for_bit(kind: str, gpu: Context, logged: list[str]) -> None:
    """Loss and every gradient; no module's dictionary differs, nothing is logged."""
    model, untouched = tiny.model(kind), tiny.model(kind)
    before = owned(model)
    ops.apply(model, config(POLICY, "native"), gpu)

    assert before == owned(model) and [] == logged
    for each in (model, untouched):
        each(**batch()).loss.backward()
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(theirs.grad, ours.grad)


def test_auto_installs_and_logs_one_table(gpu: Context, logged: list[str]) -> None:
    """On rank 0, at INFO."""
    model = tiny.model()
    ops.apply(model, config(), gpu)
    (message,) = logged

    assert message.startswith("operators (auto, cuda, float32)\n")
    assert 5 == sum(1 for module in model.modules() if "RMSNorm" in type(module).__name__ and "forward" in vars(module))


def test_the_table_is_rank_0s(gpu: Context, logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    ops.apply(tiny.model(), config(), gpu)

    assert [] == logged


def test_custom_without_the_packages_is_refused_before_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, all operators at once, with the place of the key; the model is left alone."""
    monkeypatch.setattr("torchturbo.ops.registry.Implementation._missing_tool", lambda self: None)
    context = Context(runtime=Gpu())
    with torch.device("meta"):
        model = tiny.model()
    before = owned(model)
    problems = pipeline.problems(model, config(POLICY, "custom"), context)

    assert 4 == len(problems)
    assert {(POLICY, "ops.policy", "install it: pip install liger-kernel")} == {
        (problem.place, problem.key, problem.remedy) for problem in problems
    }
    assert before == owned(model)
    assert [] == pipeline.problems(model, config(), context)
    with pytest.raises(ConfigError):
        ops.apply(tiny.model(), config(POLICY, "custom"), context)


def test_release_gives_the_native_model_back(gpu: Context) -> None:
    """Also from under the normaliser, which lies over the loss function by then."""
    model = tiny.model()
    classes = {type(module): dict(vars(type(module))) for module in model.modules()}
    engine = Engine(config(), gpu)
    engine.prepare(model)
    loss_function = model.loss_function.wrapped
    assert loss_function.replaces.__name__ == "ForCausalLMLoss"
    engine.release(model)

    assert [] == [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert classes == {type(module): dict(vars(type(module))) for module in model.modules()}
    vars(sys.modules["liger_kernel.ops"]).clear()  # a kernel that is still called is an error now
    logits, labels = torch.randn(1, 4, 320), torch.tensor([[3, 4, 5, 6]])
    expected = loss_function.replaces(logits, labels, 320)
    assert torch.equal(expected, loss_function(logits, labels, 320))


def test_a_second_trainer_starts_from_the_native_model(gpu: Context) -> None:
    """Its policy is not the first one's."""
    model = tiny.model()
    Engine(config(), gpu).prepare(model)
    assert "forward" in vars(model.model.norm)
    Engine(config(POLICY, "native"), gpu).prepare(model)

    assert [] == [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_second_trainers_check_sees_the_native_model(gpu: Context) -> None:
    """The first one's operators would hide the model's own from it."""
    model = tiny.model()
    Engine(config(), gpu).prepare(model)
    vars(sys.modules["liger_kernel.ops"]).clear()
    problems = Engine(config(POLICY, "custom"), gpu).problems(model)

    assert 4 == sum(problem.key == "ops.policy" for problem in problems)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_the_normaliser_and_checkpointing(reentrant: bool, gpu: Context) -> None:
    """The step's loss and gradients equal native ones, recomputed layers included."""
    word = (str(KEYS["activation_checkpointing.use_reentrant"].cli), str(reentrant).lower())
    gradients = []
    for chosen in ("auto", "native"):
        model = tiny.model("qwen3")
        context = Context(runtime=gpu.runtime)
        Engine(config(POLICY, chosen, *word), context).prepare(model.train())
        assert context.normaliser is not None
        context.normaliser.open_window([batch()], torch.device("cpu"))
        with context.normaliser.applied():
            loss = model(**batch()).loss
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(theirs, ours, atol=2e-6 * float(theirs.abs().max()), rtol=1e-5)


def test_the_loss_is_a_mean_outside_a_window(gpu: Context) -> None:
    """As Transformers' own function is without a number of items, and over a tensor or a number of them."""
    model, native = tiny.model(), tiny.model()
    ops.apply(model, config(), gpu)
    for items in (None, 5, torch.tensor(5)):
        expected, found = (each(**batch(), num_items_in_batch=items).loss for each in (native, model))
        torch.testing.assert_close(expected, found)


def test_the_chunked_loss_keeps_its_place(gpu: Context, logged: list[str]) -> None:
    """The loss function stays Transformers'; the table says what computes the loss."""
    model = tiny.model()
    Engine(config(CHUNKED, "true"), gpu).prepare(model)

    assert "ForCausalLMLoss" == model.loss_function.wrapped.__name__
    assert not hasattr(model.loss_function.wrapped, "replaces")
    assert any("cross_entropy  chunked loss" in message for message in logged)


def test_a_peft_model(gpu: Context) -> None:
    """LoRA's layers are called inside the exchanged modules: the adapters learn the same."""
    peft = pytest.importorskip("peft")
    gradients = []
    for chosen in ("auto", "native"):
        torch.manual_seed(1)
        settings = peft.LoraConfig(target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(tiny.model(), settings)
        ops.apply(model, config(POLICY, chosen), gpu)
        assert (chosen == "auto") == ("forward" in vars(model.get_base_model().model.layers[0].mlp))
        model(**batch()).loss.backward()
        gradients.append([value.grad for value in model.parameters() if value.requires_grad])
    assert len(gradients[0]) == 12
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(theirs, ours, atol=2e-6 * float(theirs.abs().max()), rtol=1e-5)


def test_a_copy_of_the_model_is_its_own(gpu: Context) -> None:
    """What it computes follows its own weights."""
    model = tiny.model()
    ops.apply(model, config(), gpu)
    twin = copy.deepcopy(model)
    expected = model(**batch()).loss.detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    assert torch.equal(expected, twin(**batch()).loss.detach())


def test_a_copys_trainer_starts_from_the_native_model(gpu: Context) -> None:
    """A copy has what was installed and no handle of it; the original keeps its own."""
    model = tiny.model()
    Engine(config(), gpu).prepare(model)
    installed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    twin = copy.deepcopy(model)
    assert hasattr(own_loss_function(twin), "replaces")
    Engine(config(POLICY, "native"), Context(runtime=gpu.runtime)).prepare(twin)

    assert [] == [name for name, module in twin.named_modules() if "forward" in vars(module)]
    assert "ForCausalLMLoss" == own_loss_function(twin).__name__ and not hasattr(own_loss_function(twin), "replaces")
    assert installed == [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert hasattr(own_loss_function(model), "replaces")


def test_experts_follow_autocast() -> None:
    """Transformers' grouped product leaves it; native eager experts multiply in bf16 there."""
    model, native = tiny.model("mixtral"), tiny.model("mixtral")
    native.set_experts_implementation("eager")
    bf16 = build_from_args(parse_torchturbo_args([PLAIN[0], "bf16"])[0])
    ops.apply(model, bf16, Context(runtime=CpuRuntime()))
    seen: list[torch.dtype] = []
    real = torch.nn.functional.grouped_mm

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[1].dtype)
        return real(*args, **kwargs)

    with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "grouped_mm", noted)
        found = model(**batch()).loss
        expected = native(**batch()).loss
    found.backward()
    expected.backward()

    assert {torch.bfloat16} == set(seen)
    torch.testing.assert_close(expected, found, atol=2e-2, rtol=2e-2)
    for name, parameter in model.named_parameters():
        if "experts" in name:
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32


def test_custom_trains_with_compiled_operators_on_a_cpu() -> None:
    """A whole step, layers recomputed: loss and gradients equal native ones, at two lengths with one kernel each."""
    gradients = []
    for chosen in ("custom", "native"):
        model = tiny.model("qwen3")
        Engine(config(POLICY, chosen), Context(runtime=CpuRuntime())).prepare(model.train())
        for length in (11, 7):
            loss = model(**{k: v[:, :length] if torch.is_tensor(v) else v for k, v in batch().items()}).loss
            loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(theirs, ours, atol=2e-6 * float(theirs.abs().max()), rtol=1e-5)
