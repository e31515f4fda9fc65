"""What chunked loss refuses, with place, finding and remedy, before a weight is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    ElectraConfig,
    ElectraForCausalLM,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from torchturbo.adapters.hf_trainer import TurboTrainer
from torchturbo.engine import pipeline
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.engine.engine import Context, Engine
from torchturbo.errors import ConfigError
from torchturbo.objectives import chunked
from torchturbo.objectives.chunked_check import obstacle
from torchturbo.train.run import train

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip

ELECTRA = {"is_decoder": True, "embedding_size": 32}
FAMILIES = [
    *("apertus", "arcee", "bloom", "codegen", "cohere", "cohere2", "deepseek_v3", "falcon", "gemma", "gemma2", "glm4"),
    *("gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoe", "llama", "mistral", "mixtral", "mpt", "olmo2", "olmoe"),
    *("opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_known_without_its_weights(family: str) -> None:
    """On the meta device, where a touched weight would be an error; the model stays as it was."""
    config = AutoConfig.for_model(family)
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    kinds = {name: type(module) for name, module in model.named_modules()}
    own = {name: set(vars(module)) for name, module in model.named_modules()}

    assert obstacle(model) is None
    assert kinds == {name: type(module) for name, module in model.named_modules()}
    assert own == {name: set(vars(module)) for name, module in model.named_modules()}


class OwnHead(LlamaForCausalLM):  # type: ignore[misc]
    """A head of two layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 320))


class OwnLogits(LlamaForCausalLM):  # type: ignore[misc]
    """Does to its logits what one chunk alone could do, but nobody has said so."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        return {"loss": self.loss_function(logits - logits.logsumexp(-1, keepdim=True), labels, 320), "logits": logits}


class PastTheHead(LlamaForCausalLM):  # type: ignore[misc]
    """Multiplies with the head's weight without calling it."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.model(input_ids, **kwargs).last_hidden_state @ self.lm_head.weight.T
        return {"loss": self.loss_function(logits, labels, 320), "logits": logits}


class MaskedLogits(LlamaForCausalLM):  # type: ignore[misc]
    """Drops the positions that the mask hides, when there is a mask."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        if attention_mask is not None:
            logits, labels = logits[attention_mask != 0], labels[attention_mask != 0]
        return {"loss": self.loss_function(logits, labels, 320), "logits": logits}


class Broken(LlamaForCausalLM):  # type: ignore[misc]
    """Needs more than a stand-in has."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return self.lm_head(self.model(input_ids).secret.states)


def own_loss(model: Any) -> Any:
    model.loss_function = lambda logits, labels, vocab_size: logits.sum()
    return model


def llama(kind: Any = LlamaForCausalLM) -> Any:
    with torch.device("meta"):
        return kind(tiny.model().config)


def t5() -> Any:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def headless(model: Any) -> Any:
    model.get_output_embeddings = lambda: None
    return model


REFUSED = {
    "a head of two layers": (lambda: llama(OwnHead), "the head of OwnHead is a Sequential, expected a linear layer"),
    "unknown logits": (lambda: llama(OwnLogits), r"OwnLogits does something to its logits .* in chunks: logsumexp\(\)"),
    "masked logits": (lambda: llama(MaskedLogits), r"MaskedLogits does something .* in chunks: __getitem__\(\)"),
    "past the head": (lambda: llama(PastTheHead), "PastTheHead does not compute its loss from its head's logits"),
    "own loss": (lambda: own_loss(llama()), "LlamaForCausalLM uses the loss <lambda>, expected .* ForCausalLMLoss"),
    "broken": (lambda: llama(Broken), "what Broken does after its backbone could not be followed: AttributeError"),
    "an encoder-decoder": (t5, "T5ForConditionalGeneration is an encoder-decoder, expected a causal language model"),
    "no head": (lambda: headless(llama()), "LlamaForCausalLM has no output embeddings, expected a linear head"),
}


@pytest.mark.parametrize(("make", "told"), REFUSED.values(), ids=list(REFUSED))
def test_what_can_not_be_chunked_is_said(make: Any, told: str) -> None:
    """What was expected and what was found."""
    model = make()
    if isinstance(model, LlamaForCausalLM):
        model.loss_type = "ForCausalLM"  # Transformers derives it from the class's name

    found = obstacle(model)

    assert found is not None
    assert re.search(told, found), found


@pytest.mark.parametrize(
    ("kind", "config"),
    [(BertLMHeadModel, BertConfig(**SMALL, is_decoder=True)), (ElectraForCausalLM, ElectraConfig(**SMALL, **ELECTRA))],
    ids=["in the head's own module", "beside it"],
)
def test_a_layer_between_backbone_and_head_is_no_obstacle(kind: Any, config: Any) -> None:
    """It gets hidden states, so it is run and not replaced as the backbone is."""
    with torch.device("meta"):
        model = kind(config)

    assert obstacle(model) is None


def config(*line: str) -> Any:
    return build_from_args(parse_torchturbo_args(line)[0])


def test_the_check_reports_key_place_and_remedy() -> None:
    """Together with what other steps find; nothing where the key is off."""
    (problem,) = pipeline.problems(llama(OwnHead), config("--tt_enable_chunk_loss"), Context())

    expected = (
        "--tt_enable_chunk_loss: loss_chunk.enabled: "
        "the head of OwnHead is a Sequential, expected a linear layer; set it to false"
    )
    assert expected == str(problem)
    assert [] == pipeline.problems(llama(OwnHead), config(), Context())
    assert [] == pipeline.problems(llama(), config("--tt_enable_chunk_loss"), Context())


def test_a_model_that_was_not_checked_is_refused_when_it_is_prepared(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever uses the engine without an adapter meets the same error."""
    with pytest.raises(ConfigError, match="the head of OwnHead is a Sequential"):
        Engine(config("--tt_enable_chunk_loss"), Context()).prepare(OwnHead(tiny.model().config))
    assert "error: --tt_enable_chunk_loss: loss_chunk.enabled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "size"), [((), 1024), (("--tt_loss_chunk_size", "null"), 1024), (("--tt_loss_chunk_size", "7"), 7)]
)
def test_the_size_of_a_chunk_is_the_keys(words: tuple[str, ...], size: int) -> None:
    """Null is the documented default."""
    model: Any = tiny.model()
    Engine(config("--tt_enable_chunk_loss", *words), Context()).prepare(model)

    assert size == model.lm_head.turbo_chunking.size


def test_the_switch_is_the_keys() -> None:
    """On and off, also on a model that an earlier engine prepared."""
    model: Any = tiny.model()
    plain = type(model)
    for on in (True, False, True):
        Engine(config(*["--tt_enable_chunk_loss"] * on), Context()).prepare(model)
        assert on == isinstance(model, chunked.ChunkedModel) == isinstance(model.lm_head, chunked.ChunkedHead)
    chunked.remove(model)
    assert plain is type(model)


REMOTE = """
from torch import nn
from transformers import LlamaForCausalLM

class RemoteHead(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 320))

class RemoteLogits(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)[..., :-1, :]
        return {"loss": self.loss_function(logits, labels, 320), "logits": logits}
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("RemoteHead", "the head of RemoteHead is a Sequential, expected a linear layer"),
        ("RemoteLogits", "RemoteLogits does something to its logits that can't be done in chunks: __getitem__()"),
    ],
)
def test_train_refuses_before_it_reads_a_weight(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the file, line and column of the key; the same model trains without it as far as we are concerned."""
    folder = tiny.save(tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": f"modeling_remote.{name}"}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "modeling_remote.py").write_text(REMOTE)
    turbo = tmp_path / "turbo.yaml"
    turbo.write_text("loss_chunk:\n  enabled: true\n")
    read: list[Any] = []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: read.append(args))

    with pytest.raises(ConfigError):
        train([
            "--tt_config", str(turbo), "--model_name_or_path", str(folder), "--trust_remote_code", "--use_cpu",
            "--dataset", str(tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.rows())), "--output_dir", str(tmp_path / "o"),
        ])  # fmt: skip

    assert f"error: {turbo}:2:12: loss_chunk.enabled: {told}; set it to false\n" in capsys.readouterr().err
    assert [] == read


# ---- losses outside the model ----


def trainer(folder: Path, kind: type = TurboTrainer, changes: Any = None, **given: Any) -> Any:
    set_torchturbo_args(parse_torchturbo_args(["--tt_enable_chunk_loss"])[0])
    try:
        args = TrainingArguments(str(folder), use_cpu=True, report_to="none", **(changes or {}))
        return kind(model=tiny.model(), args=args, **given)
    finally:
        set_torchturbo_args(None)


def test_label_smoothing_and_chunks_exclude_each_other(tmp_path: Path) -> None:
    """Trainer's label smoother takes the labels away from the model: the key would do nothing."""
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, changes={"label_smoothing_factor": 0.1})

    expected = (
        "TrainingArguments.label_smoothing_factor: loss_chunk.enabled: label smoothing needs the logits in one piece, "
        "and --tt_enable_chunk_loss asks for chunks; leave one of them out"
    )
    assert expected == str(caught.value)


def test_a_loss_function_of_ones_own_and_chunks_exclude_each_other(tmp_path: Path) -> None:
    """It is handed the model's outputs, in which there are no logits."""
    with pytest.raises(ConfigError, match=r"Trainer\(compute_loss_func\): loss_chunk.enabled: a loss function of your"):
        trainer(tmp_path, compute_loss_func=lambda outputs, labels, **kwargs: outputs["logits"].sum())


def test_train_refuses_label_smoothing_with_the_other_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is looked at."""
    folder = tiny.save(tmp_path / "model")
    with pytest.raises(ConfigError):
        train([
            "--tt_enable_chunk_loss", "--model_name_or_path", str(folder), "--label_smoothing_factor", "0.1",
            "--dataset", str(tmp_path / "none.jsonl"), "--output_dir", str(tmp_path / "o"), "--use_cpu",
        ])  # fmt: skip

    told = capsys.readouterr().err
    assert "error: --label_smoothing_factor: loss_chunk.enabled: label smoothing needs the logits in one piece" in told
    assert "none.jsonl" in told


def test_without_the_key_both_work_as_before(tmp_path: Path) -> None:
    """They are refused together, not alone."""
    set_torchturbo_args(None)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=0.1)

    assert isinstance(TurboTrainer(model=tiny.model(), args=args), Trainer)
