"""Training arguments that are second owners, in every way in which people give them."""

from __future__ import annotations

import json
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest

from torchturbo.adapters.hf_arguments import clashes, framework_values, idle_for_fsdp2, options


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("use_liger_kernel", "kernels have one owner"),
        ("auto_find_batch_size", "micro-batch behind the batch plan"),
        ("save_on_each_node", "all ranks write one folder"),
    ],
)
def test_switches_that_are_second_owners(name: str, reason: str) -> None:
    """Off is fine."""
    (problem,) = clashes({name: True}, typed=True)
    assert (f"--{name}", True) == (problem.place, reason in problem.message)
    assert problem.remedy.startswith("remove it")
    assert [] == clashes({name: False})


GROUPS = [
    ("accelerator_config", {"split_batches": True}, "split_batches would divide"),
    ("accelerator_config", {"even_batches": False}, "without even_batches"),
    ("accelerator_config", {"gradient_accumulation_kwargs": {"num_steps": 4}}, "num_steps is a second batch size"),
    ("gradient_checkpointing_kwargs", {"use_reentrant": True, "offload": 1}, "the engine has no offload"),
]


@pytest.mark.parametrize("given", [dict, json.dumps, UserDict, lambda group: SimpleNamespace(**group)])
@pytest.mark.parametrize(("name", "group", "message"), GROUPS)
def test_groups_of_options_however_given(name: str, group: dict[str, Any], message: str, given: Any) -> None:
    """A file holds a mapping, a flag its JSON text, TrainingArguments an object."""
    (problem,) = clashes({name: given(group)})
    assert (f"TrainingArguments.{name}", True) == (problem.place, message in problem.message)


@pytest.mark.parametrize(
    "value",
    [{"split_batches": False, "even_batches": True}, '{"split_batches": "False"}', "accelerate.json", None, True],
)
def test_groups_that_say_nothing_bad(value: Any) -> None:
    """Another value, a file's name, a flag without one."""
    assert [] == clashes({"accelerator_config": value})


@pytest.mark.parametrize("value", [{"use_reentrant": True}, '{"use_reentrant": true}', '{"use_reentrant": "TRUE"}'])
def test_reentrant_checkpointing_is_a_key_of_ours(value: Any) -> None:
    """As text too, in which TrainingArguments reads words as switches."""
    (found,) = framework_values({"gradient_checkpointing_kwargs": value}, typed=True)
    assert ("activation_checkpointing.use_reentrant", True, "--gradient_checkpointing_kwargs") == found


def test_text_that_is_no_group() -> None:
    """Nothing in it, however deep it goes."""
    for text in ("", "{", "[1]", "3", "[" * 100_000):
        assert {} == options(text)


def test_what_only_ddp_reads_is_told() -> None:
    """Turned on by the user, and without effect where FSDP2 shards the model; turned off it asks for nothing."""
    said = {"ddp_find_unused_parameters": True, "ddp_static_graph": False, "ddp_backend": "gloo", "seed": 1}

    assert ["ddp_find_unused_parameters"] == idle_for_fsdp2(said)
