"""LLaMA-Factory's arguments as a layer, and what of them is refused: each by name, with its place and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchturbo.adapters.llama_factory import build_config_from_lf_args
from torchturbo.adapters.llama_factory.mapping import FREEZE_FLAGS, framework_values, frozen_parts
from torchturbo.adapters.llama_factory.refusals import (
    AGAINST_KEYS,
    ENVIRONMENT,
    OWN_LOSSES,
    SWITCHES,
    VALUES,
    key_clashes,
    nothing_to_do,
    refusals,
    term_clashes,
)
from torchturbo.adapters.llama_factory.said import Said, read_arguments
from torchturbo.config.layers import Layer
from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.errors import ConfigError
from torchturbo.plugins.contract import Plugin


def said(**values: Any) -> dict[str, Said]:
    return {name: Said(value, f"train.yaml:1:1: {name}") for name, value in values.items()}


def mapped(**values: Any) -> dict[str, Any]:
    found, problems = framework_values(said(**values))
    assert [] == problems
    assert all(value.place.startswith("train.yaml:1:1: ") for value in found)
    return {value.path: value.value for value in found}


CHECKPOINTING = "activation_checkpointing.enabled"
REENTRANT = "activation_checkpointing.use_reentrant"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"bf16": True}, {"mixed_precision": "bf16"}),
        ({"bf16": False}, {"mixed_precision": "fp32"}),
        ({"full_determinism": True}, {"use_deterministic_algorithms": True}),
        ({"disable_gradient_checkpointing": True}, {CHECKPOINTING: False}),
        ({"disable_gradient_checkpointing": False}, {CHECKPOINTING: True}),
        ({"gradient_checkpointing": False}, {CHECKPOINTING: False}),
        ({"use_reentrant_gc": True}, {REENTRANT: True}),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {REENTRANT: True}),
        ({"freeze_vision_tower": True}, {"freeze_policy.vision_tower": True}),
        ({"freeze_multi_modal_projector": False}, {"freeze_policy.multi_modal_projector": False}),
        ({"freeze_language_model": True}, {"freeze_policy.language_model": True}),
        ({"gradient_accumulation_steps": 4, "learning_rate": 1.0, "dataset": "a"}, {}),
        ({}, {}),
    ],
)
def test_what_means_a_key_of_ours(values: dict[str, Any], expected: dict[str, Any]) -> None:
    """Only what was written; the rest is LLaMA-Factory's own."""
    assert expected == mapped(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"disable_gradient_checkpointing": True, "gradient_checkpointing": True},
        {"use_reentrant_gc": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
)
def test_two_arguments_that_contradict_each_other(values: dict[str, Any]) -> None:
    """Both are named."""
    _, (problem,) = framework_values(said(**values))
    assert all(name in str(problem) for name in values)
    assert "keep one" in problem.remedy


@pytest.mark.parametrize("name", [*SWITCHES, *VALUES])
def test_each_second_owner_is_refused(name: str) -> None:
    """Off is fine."""
    (problem,) = refusals(said(**{name: 4 if name in VALUES else True}), {})
    assert f"train.yaml:1:1: {name}" == problem.place
    assert problem.message and problem.remedy
    assert [] == refusals(said(**{name: None if name in VALUES else False}), {})


@pytest.mark.parametrize(
    "name", ["deepspeed", "fsdp", "fp16", "bf16_full_eval", "use_liger_kernel", "auto_find_batch_size"]
)
def test_so_are_those_of_any_trainer(name: str) -> None:
    """With the place in LLaMA-Factory's file."""
    (problem,) = refusals(said(**{name: "x.json"}), {})
    assert f"train.yaml:1:1: {name}" == problem.place


def test_groups_of_options_in_flags_and_files(tmp_path: Path) -> None:
    """A flag's JSON text and a file's mapping say the same."""
    path = tmp_path / "train.yaml"
    path.write_text("accelerator_config: {split_batches: true}\ngradient_checkpointing_kwargs: {use_reentrant: true}\n")
    words = ["--accelerator_config", '{"split_batches": true}']
    words += ["--gradient_checkpointing_kwargs", '{"use_reentrant": true}']
    for given, place in (([str(path)], f"{path}:1:21: accelerator_config"), (words, "--accelerator_config")):
        read = read_arguments(given).said
        (problem,) = refusals(read, {})
        assert (place, True) == (problem.place, problem.message.startswith("split_batches would"))
        ((found, value, _),) = framework_values(read)[0]
        assert (REENTRANT, True) == (found, value)


def test_the_value_of_a_variable_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's ``${...}`` may be a secret."""
    monkeypatch.setenv("MY_SECRET", "s3cr3t")
    path = tmp_path / "train.yaml"
    path.write_text("stage: ${oc.env:MY_SECRET}\nfinetuning_type: oft\n")
    one, two = refusals(read_arguments([str(path)]).said, {})
    assert "the engine does not run its value, it runs pt, sft" == one.message
    assert "the method oft" in two.message


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_its_variables(name: str) -> None:
    """In its own three words for on."""
    for word in ("1", "true", "Y"):
        (problem,) = refusals({}, {name: word})
        assert (name, True) == (problem.place, bool(problem.remedy))
    for word in ("0", "", "yes", "on"):
        assert [] == refusals({}, {name: word})


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"stage": "dpo"}, ["stage dpo"]),
        ({"stage": "rm", "finetuning_type": "oft"}, ["stage rm", "method oft"]),
        ({"stage": "ppo"}, ["stage ppo"]),
        ({"stage": "kto"}, ["stage kto"]),
        ({"stage": "pt", "finetuning_type": "freeze"}, []),
    ],
)
def test_stages_and_methods(values: dict[str, Any], found: list[str]) -> None:
    """By name, with what runs them."""
    problems = refusals(said(**values), {})
    assert len(found) == len(problems)
    for name, problem in zip(found, problems, strict=True):
        assert f"does not run the {name}, it runs" in problem.message
        assert "llamafactory-cli" in problem.remedy


def test_our_names_among_its_arguments() -> None:
    """LLaMA-Factory would call them unknown, or drop them in silence."""
    one, two, three = refusals(said(tt_sp_size=2, tt_plugin="a.py", tt_nope=1), {})
    assert "use --tt_sp_size on the command line, or parallel_plan.sp_size in its file" == one.remedy
    assert "use --tt_plugin on the command line" == two.remedy
    assert "remove it" == three.remedy


def test_a_file_that_would_do_nothing() -> None:
    """LLaMA-Factory's do_train is off by default."""
    (problem,) = nothing_to_do(said(stage="sft"))
    assert "add do_train: true" == problem.remedy
    assert [] == nothing_to_do(said(do_eval=True))


@pytest.mark.parametrize(("name", "path", "reason"), AGAINST_KEYS)
def test_keys_that_have_no_place_beside_a_switch(name: str, path: str, reason: str) -> None:
    """Both places are in the line."""
    from torchturbo.engine.config import merge_args

    words = {
        "loss_chunk.enabled": ["--tt_enable_chunk_loss"],
        "profiling": ["--tt_profiling"],
        "optimizer.name": ["--tt_optimizer", "muon"],
        "mtp.enabled": ["--tt_enable_mtp"],
        "moe.aux_loss_coeff": ["--tt_moe_aux_loss_coeff", "0.1"],
        "moe.z_loss_coeff": ["--tt_moe_z_loss_coeff", "0.1"],
    }[path]
    flag = words[0]
    merged = merge_args(parse_torchturbo_args(words)[0], environ={})
    value = {"label_smoothing_factor": 0.1, "loraplus_lr_ratio": 16.0, "optim": "sgd", "optim_args": "a=1"}.get(
        name, True
    )
    (problem,) = key_clashes(said(**{name: value}), merged.settings)
    assert f"train.yaml:1:1: {name}" == problem.place
    assert f"({path}: {flag})" in problem.message
    assert [] == key_clashes(said(**{name: 0}), merged.settings)
    assert [] == key_clashes(said(**{name: value}), merge_args(environ={}).settings)


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_a_loss_outside_the_model_takes_no_terms(name: str) -> None:
    """Told with the plugin's name; one without a term is none of its business."""

    class Term(Plugin):
        name = "term"

        def loss_term(self, outputs: Any, batch: Any, run: Any) -> Any:
            return None

    value = 0.1 if name == "label_smoothing_factor" else True
    (problem,) = term_clashes(said(**{name: value}), [Plugin(), Term()])
    assert (f"train.yaml:1:1: {name}", "plugin term") == (problem.place, problem.key)
    for off in (0, 0.0, False, None, "0.1"):
        assert [] == term_clashes(said(**{name: off}), [Term()])


# ---- build_config_from_lf_args ----


def holders(factory: Path, **values: Any) -> list[Any]:
    from llamafactory.hparams.parser import _TRAIN_ARGS  # the stand-in's

    return [
        kind(**{name: value for name, value in values.items() if name in kind.__dataclass_fields__})
        for kind in _TRAIN_ARGS
    ]


def test_a_configuration_from_the_dataclasses(factory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs from their defaults was said; a layer of ours beats it."""
    monkeypatch.setenv("TORCH_TURBO_GBS", "8")
    args = parse_torchturbo_args(["--tt_gradient_checkpointing", "true"])[0]
    changed = {"bf16": True, "freeze_vision_tower": False, "disable_gradient_checkpointing": True}
    config = build_config_from_lf_args(*holders(factory, **changed), args=args)

    assert ("bf16", 8, True) == (config.mixed_precision, config.gbs, config.activation_checkpointing.enabled)
    assert (Layer.FRAMEWORK, "TrainingArguments.bf16") == config.origin("mixed_precision")
    assert (Layer.FRAMEWORK, "FinetuningArguments.freeze_vision_tower") == config.origin("freeze_policy.vision_tower")
    assert Layer.DEFAULT is config.origin("freeze_policy.multi_modal_projector").layer


def test_a_configuration_from_what_was_written(factory: Path) -> None:
    """A default that was written out counts."""
    made = holders(factory, freeze_vision_tower=True)
    config = build_config_from_lf_args(*made, said={"freeze_vision_tower": True}, environ={})

    assert config.freeze_policy.vision_tower
    assert "FinetuningArguments.freeze_vision_tower" == config.origin("freeze_policy.vision_tower").place
    assert not build_config_from_lf_args(*made, environ={}).freeze_policy.vision_tower


def test_a_configuration_is_refused_with_everything(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Second owners and other stages in one go."""
    with pytest.raises(ConfigError):
        build_config_from_lf_args(*holders(factory, use_muon=True, stage="dpo", quantization_bit=4), environ={})

    lines = capsys.readouterr().err
    for part in ("FinetuningArguments.use_muon", "stage dpo", "ModelArguments.quantization_bit"):
        assert part in lines


@pytest.mark.parametrize(
    ("words", "values", "expected"),
    [
        ([], {}, {}),
        ([], {"freeze_vision_tower": True}, {"freeze_vision_tower": True}),
        (["--tt_freeze_language_model"], {}, dict(zip(FREEZE_FLAGS, (False, False, True), strict=True))),
        (
            ["--tt_freeze_vision_tower", "false"],
            {"freeze_vision_tower": True},
            dict.fromkeys(FREEZE_FLAGS, False),
        ),
    ],
)
def test_what_llamafactory_is_told_to_freeze(
    words: list[str], values: dict[str, Any], expected: dict[str, bool], factory: Path
) -> None:
    """Nothing where nobody spoke: its own defaults hold."""
    args = parse_torchturbo_args(words)[0]
    config = build_config_from_lf_args(*holders(factory), args=args, said=values, environ={})
    assert expected == frozen_parts(config)


def test_words_and_mapping_together() -> None:
    """As a launch reads them: the place is the file's."""
    found, _ = framework_values(read_arguments(["--bf16", "--use_reentrant_gc", "false"]).said)
    assert [("mixed_precision", "bf16", "--bf16"), (REENTRANT, False, "--use_reentrant_gc")] == found
