"""Settings that nothing will read, and relations between keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launching import launch

from torchturbo.config.keys import Condition, Key, shown
from torchturbo.engine.config import FrameworkValue
from torchturbo.generated.keys import KEYS, RULES

SWITCHED = [key for key in KEYS.values() if key.active_when]


def off(condition: Condition) -> Any:
    """Return a value of the other key under which the condition does not hold."""
    other = KEYS[condition.path]
    if condition.minimum is not None:
        return condition.minimum - 1
    if other.type == "boolean":
        return not condition.allowed[0]
    return next(choice for choice in other.choices if choice not in condition.allowed)


def on(condition: Condition) -> Any:
    return condition.minimum if condition.minimum is not None else condition.allowed[0]


def file_of(values: dict[str, Any]) -> str:
    """Return a file, JSON being YAML, that sets keys by their dotted paths."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return json.dumps(tree)


def about(path: str, warnings: list[str]) -> list[str]:
    return [warning for warning in warnings if f": {path}: set but not read" in warning]


def test_the_switches_that_the_keys_need() -> None:
    """Which keys are idle without another one is part of what the configuration promises."""
    assert {
        "backend_config.cpu_offload.mode",
        "backend_config.cpu_offload.optimizer_memory_fraction",
        "backend_config.prefetch_direction",
        "backend_config.forward_prefetch_depth",
        "backend_config.backward_prefetch_depth",
        "activation_checkpointing.use_reentrant",
        "mtp.loss_scaling_factor",
        "mtp.log_loss",
        "dspark.enabled",
        "dspark.loss_scaling_factor",
        "dspark.num_anchors",
        "dspark.loss_decay_gamma",
        "dspark.ce_loss_alpha",
        "dspark.l1_loss_alpha",
        "dspark.confidence_loss_alpha",
        "moe.token_dispatcher",
        "loss_chunk.chunk_size",
        "mfu.card",
    } == {key.path for key in SWITCHED}


@pytest.mark.parametrize("key", SWITCHED, ids=lambda key: key.path)
def test_an_idle_key_that_was_set_warns_once(key: Key) -> None:
    """One line with the place, the key, what is in its way, and the switch; the value is taken all the same."""
    for condition in key.active_when:
        values = {other.path: on(other) for other in key.active_when} | {condition.path: off(condition)}
        value = True if key.type == "boolean" else key.examples[0]
        done = launch(file=file_of(values | {key.path: value}))
        (warning,) = about(key.path, done.warnings)
        assert [] == done.errors
        assert warning.startswith(
            f"turbo.yaml:{done.place(key.path).partition(':')[2]}: {key.path}: set but not read ("
        )
        assert f"{condition.path} is " in warning and f"; it is read when {condition.path} is " in warning
        assert value == done[key.path]


@pytest.mark.parametrize("key", SWITCHED, ids=lambda key: key.path)
def test_a_key_whose_switch_is_on_does_not_warn(key: Key) -> None:
    """Once every condition holds nothing is said of the key."""
    values = {condition.path: on(condition) for condition in key.active_when}
    for condition in [*key.active_when]:  # what switches the switch
        values |= {other.path: on(other) for other in KEYS[condition.path].active_when}
    done = launch(file=file_of(values | {key.path: key.examples[0]}))
    assert ([], []) == (done.errors, done.warnings)


@pytest.mark.parametrize("key", [key for key in SWITCHED if key.cli], ids=lambda key: key.path)
def test_idle_options_are_named_as_they_were_given(key: Key) -> None:
    """On a command line the place is the option, also for a value that is the default."""
    condition = key.active_when[0]
    text = "true" if key.type == "boolean" else shown(key.default)
    values = {other.path: on(other) for other in key.active_when} | {condition.path: off(condition)}
    (warning,) = about(key.path, launch([str(key.cli), text], file=file_of(values)).warnings)
    assert warning.startswith(f"{key.cli}: {key.path}: set but not read")


def test_all_missing_switches_are_named() -> None:
    """Two things in the way are one warning."""
    done = launch(file="backend_config: {cpu_offload: {optimizer_memory_fraction: 0.5}}")
    assert [
        "turbo.yaml:1:59: backend_config.cpu_offload.optimizer_memory_fraction: set but not read "
        "(backend_config.cpu_offload.enabled is false, backend_config.cpu_offload.mode is all); "
        "it is read when backend_config.cpu_offload.enabled is true and backend_config.cpu_offload.mode is optimizer"
    ] == done.warnings


def test_dspark_warns_only_where_it_was_asked_for() -> None:
    """On by default means "if it can run": the default and an explicit false are silent without MTP."""
    assert [] == launch().warnings
    assert [] == launch(["--tt_enable_dspark", "false"]).warnings
    assert [] == launch(["--tt_enable_dspark", "--tt_enable_mtp"]).warnings
    assert [
        "--tt_enable_dspark: dspark.enabled: set but not read (mtp.enabled is false); "
        "it is read when mtp.enabled is true"
    ] == launch(["--tt_enable_dspark"]).warnings


def test_what_the_framework_was_told_never_warns_as_idle() -> None:
    """The user spoke to the framework, which did read it."""
    said = [FrameworkValue("activation_checkpointing.use_reentrant", True, "--theirs")]
    assert [] == launch(["--tt_gradient_checkpointing", "false"], framework=said).warnings


def test_the_default_configuration_is_valid_and_silent() -> None:
    """Nothing set, nothing said."""
    done = launch()
    assert ([], [], {}, []) == (done.errors, done.warnings, done.settings, done.rest)


def test_a_launch_that_wants_errors_only_gets_no_warnings() -> None:
    """The level that the launch asks for counts before the logger knows it."""
    assert [] == launch(["--tt_log_level", "error", "--tt_mtp_log_loss"], env={"TORCH_TURBO_NOPE": "1"}).warnings
    assert 1 == len(launch(["--tt_log_level", "warning", "--tt_mtp_log_loss"]).warnings)


# -- rules ------------------------------------------------------------------------------------------------------------


def test_the_rules_are_these() -> None:
    """One relation holds between keys today."""
    assert [("diffusion.bd_mask_low", "<=", "diffusion.bd_mask_high")] == [
        (rule.left, rule.op, rule.right) for rule in RULES
    ]


WHY = "the noise ratio is drawn between the two bounds"


@pytest.mark.parametrize(
    ("file", "argv", "place"),
    [
        ("diffusion: {bd_mask_low: 0.9, bd_mask_high: 0.5}", [], "turbo.yaml:1:26"),
        (None, ["--tt_bd_mask_low", "0.9", "--tt_bd_mask_high", "0.5"], "--tt_bd_mask_low"),
        ("diffusion: {bd_mask_high: 0.5}", ["--tt_bd_mask_low", "0.9"], "--tt_bd_mask_low"),
    ],
)
def test_a_broken_rule_has_one_verdict_whichever_layer_breaks_it(file: str | None, argv: list[str], place: str) -> None:
    """Same key, same words; only the places differ."""
    (error,) = launch(argv, file=file).errors
    assert error.startswith(f"{place}: diffusion.bd_mask_low: expected <= diffusion.bd_mask_high (0.5, ")
    assert error.endswith(f"), got 0.9; {WHY}")


def test_a_broken_rule_stands_at_the_side_that_was_said_last() -> None:
    """The lower layer was there first, and the default is nobody's fault."""
    (error,) = launch(["--tt_bd_mask_high", "0.5"], file="diffusion: {bd_mask_low: 0.9}").errors
    assert (
        "--tt_bd_mask_high: diffusion.bd_mask_high: expected >= diffusion.bd_mask_low (0.9, turbo.yaml:1:26), got 0.5; "
        f"{WHY}"
    ) == error
    (error,) = launch(["--tt_bd_mask_high", "0.2"]).errors
    assert (
        f"--tt_bd_mask_high: diffusion.bd_mask_high: expected >= diffusion.bd_mask_low (0.3, default), got 0.2; {WHY}"
    ) == error


def test_equal_sides_keep_a_rule() -> None:
    """The bounds may coincide."""
    assert [] == launch(["--tt_bd_mask_low", "0.5", "--tt_bd_mask_high", "0.5"]).errors
    assert [] == launch(["--tt_bd_mask_low", "0", "--tt_bd_mask_high", "0"]).errors
