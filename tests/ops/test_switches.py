"""Transformers' switch of attention: put back in every part of a model, and not in force where it can't compute."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import stand_ins
import tiny
import torch
from ranks import run_ranks
from stand_ins import Device

from torchturbo.ops import policy, switches
from torchturbo.ops.policy import CUSTOM, Situation

FLASH = "flash_attention_2"


def values(model: Any) -> list[Any]:
    return [dict(vars(config)) for config in switches.configurations(model)]


def hooks(model: Any) -> int:
    return len(model.model._forward_pre_hooks) + len(model.model._forward_hooks)


def switched(model: Any, device: str, dtype: str = "bfloat16") -> str:
    """Install attention alone, and return what was chosen."""
    where = Situation(model, Device(device), dtype)
    choices = [choice for choice in policy.plan(where, CUSTOM) if choice.op == "attention"]
    policy.install(choices, where)
    return choices[0].name


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Let FlashAttention be there: a stand-in that takes half formats alone. Return the formats that it gets."""
    from transformers import PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    stand_ins.put(monkeypatch, "flash_attn", flash_attn_func=1, flash_attn_varlen_func=1)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda self, **_: True)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, *_, **__: name)
    formats: list[torch.dtype] = []

    def flash(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **rest: Any) -> Any:
        if query.dtype == torch.float32:  # as Transformers does
            weight = module.q_proj.weight
            on = torch.is_autocast_enabled("cpu")
            dtype = torch.get_autocast_dtype("cpu") if on else weight.dtype
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        formats.append(query.dtype)
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return FUNCTIONS["sdpa"](module, query, key, value, None, **rest)

    monkeypatch.setitem(FUNCTIONS._local_mapping, FLASH, flash)
    return formats


def parted() -> Any:
    """Return a model one part of which has a configuration of its own, all eager."""
    model = tiny.model(attn_implementation="eager")
    part = model.model.layers[0].self_attn
    part.config = copy.deepcopy(part.config)
    return model


@pytest.mark.parametrize(("device", "name"), [("cpu", "sdpa"), ("cuda", FLASH)])
def test_every_configuration_gets_its_own_back(device: str, name: str, seen: list[torch.dtype]) -> None:
    """Of the model and of its parts, in the same dictionaries; no hook stays."""
    model = parted()
    before = values(model)
    assert name == switched(model, device)
    assert name == model.config._attn_implementation

    policy.remove(model)

    assert before == values(model) and 0 == hooks(model)


def test_a_copy_gets_its_own_back(seen: list[torch.dtype]) -> None:
    """Without the original being touched."""
    model = parted()
    before = values(model)
    switched(model, "cuda")
    chosen = values(model)
    twin = copy.deepcopy(model)

    policy.remove(twin)

    assert before == values(twin) and 0 == hooks(twin)
    assert chosen == values(model) and 2 == hooks(model)


def test_float32_outside_autocast_attends_as_before(seen: list[torch.dtype]) -> None:
    """Training is under autocast and takes FlashAttention; generation after it may not be."""
    model, native = tiny.model().eval(), tiny.model().eval()
    assert FLASH == switched(model, "cuda")
    ids = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(0))
    words = {"max_new_tokens": 4, "do_sample": False}

    assert torch.equal(native.generate(ids, **words), model.generate(ids, **words))
    assert torch.equal(native(ids).logits, model(ids).logits)
    assert [] == seen and FLASH == model.config._attn_implementation

    with torch.autocast("cpu", torch.bfloat16):
        model(ids)
    assert [torch.bfloat16] * 2 == seen
    model.bfloat16()(ids)
    assert [torch.bfloat16] * 4 == seen


def in_a_sharded_run(rank: int) -> bool:
    """Return whether attention stays switched while the parameters of a bf16 run are sharded, in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    attention = torch.nn.Linear(4, 4)
    sharded = distribute_tensor(attention.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    attention.weight = torch.nn.Parameter(sharded)
    removed: list[str] = []
    outside = switches.OutsideAutocast(attention, [SimpleNamespace(remove=lambda: removed.append("before"))], [])
    outside.enter(attention, ())
    return not removed


def test_a_sharded_run_computes_in_its_own_format() -> None:
    """Nothing autocasts there: parameters are gathered in bf16."""
    assert run_ranks(2, in_a_sharded_run) == [True, True]


def test_an_error_in_the_forward_leaves_the_switch_on(seen: list[torch.dtype]) -> None:
    """It is FlashAttention again for the next one."""
    model = tiny.model().eval()
    switched(model, "cuda")
    with pytest.raises(IndexError):
        model(torch.full((1, 3), 10**6))

    assert FLASH == model.config._attn_implementation
