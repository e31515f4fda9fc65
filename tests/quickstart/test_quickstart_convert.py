"""The conversion on a small real GGUF file: the result, and that the fast way gives the same bytes as the slow one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchturbo.quickstart import cache
from torchturbo.quickstart.convert import STAGES, convert
from torchturbo.quickstart.gguf_speed import NAMES, read_once


def sums(folder: Path) -> dict[str, str]:
    return {path.name: cache.file_sha256(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "fast"
    convert(tiny_gguf, folder)
    return folder


def test_fast_and_slow_give_the_same_bytes(tiny_gguf: Path, converted: Path, tmp_path: Path) -> None:
    convert(tiny_gguf, tmp_path / "slow", fast=False)
    assert sums(converted) == sums(tmp_path / "slow")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(sums(converted))


def test_the_file_is_read_once(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(NAMES, 0)

    def counted(name: str):
        original = getattr(gguf, name)

        def call(*args: object):
            counts[name] += 1
            return original(*args)

        return call

    for name in NAMES:
        monkeypatch.setattr(gguf, name, counted(name))
    convert(tiny_gguf, tmp_path / "fast")
    assert counts == dict.fromkeys(NAMES, 1)
    convert(tiny_gguf, tmp_path / "slow", fast=False)
    assert min(counts.values()) > 3, "Transformers no longer repeats itself: read_once() can go"


def test_gguf_is_as_before_afterwards() -> None:
    before = {name: getattr(gguf, name) for name in NAMES}
    with pytest.raises(KeyboardInterrupt), read_once() as kept:
        assert kept == NAMES
        assert all(getattr(gguf, name) is not before[name] for name in NAMES)
        raise KeyboardInterrupt
    assert {name: getattr(gguf, name) for name in NAMES} == before


def test_a_gguf_without_these_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delattr(gguf, name)
    with read_once() as kept:
        assert kept == ()
    assert not any(hasattr(gguf, name) for name in NAMES)


def test_the_model_is_dense_fp32_and_trains(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert getattr(model.config, "quantization_config", None) is None
    ids = torch.tensor([[1, 40, 50, 2]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_fp32_does_not_hang_on_the_process_s_default(tiny_gguf: Path, converted: Path, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        convert(tiny_gguf, tmp_path / "out")
    finally:
        torch.set_default_dtype(torch.float32)
    assert sums(tmp_path / "out")["model.safetensors"] == sums(converted)["model.safetensors"]


def test_the_weights_are_those_of_the_file(tiny_gguf: Path, converted: Path) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    wanted = tensors["blk.1.ffn_down.weight"]
    values = torch.from_numpy(gguf.dequantize(wanted.data, wanted.tensor_type).copy())
    state = AutoModelForCausalLM.from_pretrained(converted).state_dict()
    assert torch.equal(state["model.layers.1.mlp.down_proj.weight"], values)
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def test_the_tokenizer_has_template_and_special_tokens(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "the photo of Zoë"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n"


def test_stages_are_told_in_order(tiny_gguf: Path, tmp_path: Path) -> None:
    told: list[str] = []
    convert(tiny_gguf, tmp_path / "out", told.append)
    assert tuple(told) == STAGES


def test_older_transformers_need_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchturbo.quickstart import convert as module

    assert module._dense()["quantization_config"].dequantize is True
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))  # 5.6 has no GgufConfig
    assert module._dense() == {}
