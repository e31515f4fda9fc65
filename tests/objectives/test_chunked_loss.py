"""Chunked loss under whole models: loss, gradients and outputs against the same model without it."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional

from torchturbo.objectives import chunked
from torchturbo.objectives.chunked_check import obstacle

RELATIVE = 1e-6
FLOOR = 1e-8  # for gradients that are zero up to rounding
SIZES = (1, 7, 1024)


def batch(ignored: str = "some", **more: Any) -> dict[str, Any]:
    """Return token ids and labels [2, 9]."""
    ids = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[{"none": slice(0, 0), "some": (0, slice(0, 6)), "all": slice(None)}[ignored]] = -100
    return {"input_ids": ids, "labels": labels, **more}


def in_chunks(model: Any, size: int = 7, recompute: bool = False) -> Any:
    """Return a model with chunked loss, in the mode asked for."""
    if recompute:
        linear = model.get_output_embeddings()
        linear.__class__ = type("OwnLinear", (nn.Linear,), {})  # no subclass is known to be a plain product
    assert obstacle(model) is None
    chunked.install(model, size)
    assert recompute == chunked.recomputes(model)
    return model.train()


def step(model: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, Tensor | None]]:
    """Run forward and backward; return loss and gradients by name."""
    output = model(**inputs)
    output.loss.backward()
    return float(output.loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(expected: Any, actual: Any, relative: float = RELATIVE) -> None:
    """Compare loss and every gradient."""
    assert expected[0] == pytest.approx(actual[0], rel=relative)
    assert expected[1].keys() == actual[1].keys()
    for name, gradient in expected[1].items():
        if gradient is None:
            assert actual[1][name] is None, name
            continue
        error = float((gradient - actual[1][name]).norm())
        assert error <= relative * float(gradient.norm()) + FLOOR, name


GEMMA = {"head_dim": 8, "final_logit_softcapping": 0.1}
MODELS = [
    pytest.param("llama", {}, id="untied"),
    pytest.param("llama", {"tie_word_embeddings": True}, id="tied"),
    pytest.param("phi", {"num_key_value_heads": 4}, id="phi: a bias"),
    pytest.param("gemma2", GEMMA, id="gemma2: soft-capping, tied"),
    pytest.param("cohere", {"logit_scale": 0.3}, id="cohere: a scale, tied"),
    pytest.param("granite", {"logits_scaling": 3.0}, id="granite: a divisor"),
    pytest.param("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}, id="mixtral: a router's loss"),
]
MODES = pytest.mark.parametrize("recompute", [False, True], ids=["gradient in forward", "recompute"])


@MODES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "changes"), MODELS)
def test_loss_and_every_gradient_are_the_plain_models(
    kind: str, changes: dict[str, Any], size: int, recompute: bool
) -> None:
    """For heads of every sort and chunks of every size."""
    expected = step(tiny.model(kind, **changes).train(), batch())

    assert_same(expected, step(in_chunks(tiny.model(kind, **changes), size, recompute), batch()))


@MODES
@pytest.mark.parametrize("ignored", ["none", "some"])
@pytest.mark.parametrize("count", [None, 5, torch.tensor(5)], ids=["mean", "int", "tensor"])
def test_the_loss_is_scaled_as_transformers_does(recompute: bool, ignored: str, count: Any) -> None:
    """Over the tokens of this batch, or by the number that the trainer counted."""
    inputs = batch(ignored, **({} if count is None else {"num_items_in_batch": count}))

    expected = step(tiny.model().train(), inputs)

    assert_same(expected, step(in_chunks(tiny.model(), recompute=recompute), inputs))


@MODES
def test_loss_arguments_are_honoured(recompute: bool) -> None:
    """Labels that are shifted already, and another index of what does not count."""
    inputs = batch("none")
    inputs |= {"shift_labels": inputs["labels"].roll(-1, 1), "ignore_index": int(inputs["labels"][1, 4])}

    expected = step(tiny.model().train(), inputs)

    assert_same(expected, step(in_chunks(tiny.model(), recompute=recompute), inputs))


@MODES
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_without_targets_the_loss_and_every_gradient_are_zero(recompute: bool, kind: str) -> None:
    """Zero, not NaN, and not missing: ranks reduce their gradients together, the head's among them."""
    changes = GEMMA if kind == "gemma2" else {}

    loss, gradients = step(in_chunks(tiny.model(kind, **changes), recompute=recompute), batch("all"))

    assert loss == 0.0
    for name, gradient in gradients.items():
        assert gradient is not None and not gradient.any(), name


@MODES
def test_a_frozen_head_passes_gradients_on(recompute: bool) -> None:
    """And gets none itself."""
    plain, prepared = tiny.model().train(), in_chunks(tiny.model(), recompute=recompute)
    for model in (plain, prepared):
        model.lm_head.weight.requires_grad_(False)
    expected = step(plain, batch())

    assert_same(expected, step(prepared, batch()))
    assert prepared.lm_head.weight.grad is None


def test_a_frozen_backbone_trains_the_head() -> None:
    """Hidden states need no gradient then."""
    plain, prepared = tiny.model().train(), in_chunks(tiny.model())
    for model in (plain, prepared):
        model.model.requires_grad_(False)

    assert_same(step(plain, batch()), step(prepared, batch()))


@MODES
def test_bf16_autocast_is_as_close_as_the_format(recompute: bool) -> None:
    """The loss within DESIGN's 2e-2 for bf16, dense gradients within 5e-2; in fact far closer."""
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(tiny.model().train(), batch())
        actual = step(in_chunks(tiny.model(), recompute=recompute), batch())

    assert expected[0] == pytest.approx(actual[0], rel=1e-5)
    assert_same(expected, actual, relative=2e-2)


class SummedLinear(nn.Linear):
    """A head whose weight is the sum of two, and whose bias is one number: autograd hands out one tensor for several."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(*reversed(weight.shape), bias=False)
        self.weight, self.other = nn.Parameter(weight / 4), nn.Parameter(weight * 3 / 4)
        self.number = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight + self.other, self.number.expand(len(self.weight)))


def test_gradients_that_autograd_shares_are_added_apart() -> None:
    """Each chunk's part goes into one buffer in place, and that must be no other parameter's."""
    models = [tiny.model().train() for _ in range(2)]
    for model in models:
        model.lm_head = SummedLinear(model.lm_head.weight.detach())
    chunked.install(models[1], 5)
    assert chunked.recomputes(models[1])

    assert_same(step(models[0], batch()), step(models[1], batch()))


def test_half_precision_is_recomputed() -> None:
    """Sums of gradients before they are scaled may leave the range of fp16."""
    model = in_chunks(tiny.model())
    states = torch.zeros(3, 32)

    assert not chunked.needs_recomputing(model.lm_head, states)
    assert chunked.needs_recomputing(model.lm_head, states.half())
    with torch.autocast("cpu", torch.float16):
        assert chunked.needs_recomputing(model.lm_head, states)


def test_the_head_tells_the_mode_of_its_last_loss() -> None:
    """Autocast of the moment decides, and MFU counts what is computed; half weights are known before."""
    model = in_chunks(tiny.model())
    assert not chunked.recomputes(model)
    with torch.autocast("cpu", torch.float16):
        model(**batch())
    assert chunked.recomputes(model)
    model(**batch())
    assert not chunked.recomputes(model)

    half = tiny.model().half()
    chunked.install(half, 7)
    assert chunked.recomputes(half)


def test_a_training_forward_returns_no_logits_and_all_the_rest() -> None:
    """As a mapping and as a tuple; the router's own output is there."""
    changes = {"output_router_logits": True}
    plain, prepared = tiny.model("mixtral", **changes).train(), in_chunks(tiny.model("mixtral", **changes))

    expected, actual = plain(**batch()), prepared(**batch())

    assert actual.logits is None
    assert set(expected.keys()) - {"logits"} == set(actual.keys())
    assert type(expected) is type(actual)
    assert torch.equal(expected.aux_loss, actual.aux_loss)

    expected, actual = plain(**batch(), return_dict=False), prepared(**batch(), return_dict=False)

    place = [getattr(value, "shape", ())[-1:] for value in expected].index((320,))
    assert [at == place for at in range(len(expected))] == [value is None for value in actual]


PLAIN_CALLS = {
    "evaluation": lambda model: model.eval()(**batch()),
    "no gradients": lambda model: torch.no_grad()(model)(**batch()),
    "no labels": lambda model: model(input_ids=batch()["input_ids"]),
    "some logits": lambda model: model(input_ids=batch()["input_ids"], logits_to_keep=2),
}


@pytest.mark.parametrize("call", PLAIN_CALLS.values(), ids=list(PLAIN_CALLS))
def test_every_other_forward_is_bit_identical(call: Any) -> None:
    """Logits and loss of the plain path."""
    plain, prepared = tiny.model().train(), in_chunks(tiny.model())

    expected, actual = call(plain), call(prepared)

    assert torch.equal(expected.logits, actual.logits)
    assert (expected.loss is None) == (actual.loss is None)
    assert expected.loss is None or torch.equal(expected.loss, actual.loss)


def test_labels_and_certain_logits_keep_the_plain_path() -> None:
    """Who asks for logits gets them, also in training."""
    shifted = batch()["labels"][:, -2:]
    inputs = {"input_ids": batch()["input_ids"], "labels": shifted, "logits_to_keep": 2}

    output = in_chunks(tiny.model())(**inputs)

    assert torch.equal(tiny.model().train()(**inputs).logits, output.logits)


def test_positional_labels_are_labels() -> None:
    """Whatever place they have in the model's signature."""
    prepared = in_chunks(tiny.model())
    ids, labels = batch().values()
    place = list(inspect.signature(prepared.forward).parameters).index("labels")

    output = prepared(ids, *[None] * (place - 1), labels)

    assert output.logits is None
    assert float(prepared(**batch()).loss.detach()) == float(output.loss.detach())


def test_generation_is_the_plain_models() -> None:
    """Token by token."""
    plain, prepared = tiny.model().eval(), in_chunks(tiny.model()).eval()
    ids = batch()["input_ids"]

    assert torch.equal(
        plain.generate(ids, max_new_tokens=5, do_sample=False),
        prepared.generate(ids, max_new_tokens=5, do_sample=False),
    )


def test_the_models_own_attributes_stay_as_they_were(tmp_path: Path) -> None:
    """State dict, pickles, copies and saved folders are the plain model's, and so is what it is after removal."""
    plain, prepared = tiny.model(), in_chunks(tiny.model())
    head = prepared.lm_head

    assert list(plain.state_dict()) == list(prepared.state_dict())
    assert vars(plain).keys() == vars(prepared).keys()
    assert str(plain) == str(prepared)
    assert inspect.signature(plain.forward) == inspect.signature(prepared.forward)
    for copied in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), _through_torch(prepared)):
        assert type(plain) is type(copied)
        assert type(copied.lm_head) is nn.Linear
        assert torch.equal(prepared.lm_head.weight, copied.lm_head.weight)
    for name, model in (("plain", plain), ("prepared", prepared)):
        model.save_pretrained(tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "prepared" / file).read_bytes()

    chunked.remove(prepared)

    assert type(plain) is type(prepared)
    assert type(head) is nn.Linear


def _through_torch(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_second_installation_replaces_the_first() -> None:
    """A model may be prepared by several trainers, one after another."""
    model = in_chunks(tiny.model(), 1)
    chunked.remove(model)

    assert_same(step(tiny.model().train(), batch()), step(in_chunks(model, 1024), batch()))


def test_an_error_in_the_forward_leaves_the_model_usable() -> None:
    """The head does not go on deferring."""
    model = in_chunks(tiny.model())
    bad = batch()
    with pytest.raises(ValueError, match="18 rows of logits, 6 targets"):
        model(**bad | {"labels": bad["labels"][:, :3]})

    assert torch.is_tensor(model(input_ids=bad["input_ids"]).logits)
    assert type(model(input_ids=bad["input_ids"]).logits) is Tensor


def test_a_head_that_was_replaced_later_is_an_error() -> None:
    """Silently training without chunks would be another run than the one asked for."""
    model = in_chunks(tiny.model())
    model.set_output_embeddings(nn.Linear(32, 320, bias=False))

    with pytest.raises(RuntimeError, match="computed its loss past the head"):
        model(**batch())


def test_a_user_of_the_logits_is_told() -> None:
    """A hook on the head that computes with them can't: they do not exist."""
    model = in_chunks(tiny.model())
    model.lm_head.register_forward_hook(lambda module, args, output: output.argmax(-1) and None)

    with pytest.raises(RuntimeError, match=r"argmax\(\)"):
        model(**batch())


LLAVA = {
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 4, "patch_size": 2, "projection_dim": 16,
    },
    "text_config": {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "image_token_index": 319,
    "vision_feature_layer": -1,
}  # fmt: skip


def llava() -> Any:
    """Return a vision-language model with a loss function of its own place and a backbone of several parts."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    return LlavaForConditionalGeneration(LlavaConfig(**LLAVA)).train()


@MODES
def test_a_vision_language_model_trains_on_its_images(recompute: bool) -> None:
    """Images go through the model's own forward, and the tower gets its gradients."""
    inputs = batch()
    inputs["input_ids"][:, 1:5] = 319
    inputs["pixel_values"] = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    expected = step(llava(), inputs)

    assert_same(expected, step(in_chunks(llava(), recompute=recompute), inputs))
    assert any("vision" in name and gradient is not None for name, gradient in expected[1].items())
