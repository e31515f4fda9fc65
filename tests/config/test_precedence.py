"""The layers: which one wins, where its value stands, and what of the framework's it replaces."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from launching import Outcome, launch

from torchturbo.config.keys import Key
from torchturbo.engine.config import FrameworkValue, Layer, build_from_args
from torchturbo.engine.dump import scalar
from torchturbo.errors import ConfigError
from torchturbo.generated.keys import KEYS

FILE_KEYS = [key for key in KEYS.values() if not key.runtime]
OFTEN_MAPPED = ("mixed_precision", "gbs", "activation_checkpointing.enabled", "activation_checkpointing.use_reentrant")


def values_of(key: Key) -> list[Any]:
    """Return the values to try for a key, falsy ones and null among them; the last are not the default."""
    if key.type == "boolean":
        return [True, False]
    if key.choices:
        return [*key.choices, *([None] if key.nullable else [])]
    some = [1, 2, 3] if key.type == "integer" else [0.0, 0.25, 1.0]
    return [*some, *([None] if key.nullable else [])]


def written(value: Any) -> str:
    return scalar(value)


def setting_layers(key: Key) -> list[Layer]:
    layers = [Layer.FRAMEWORK] if key.path in OFTEN_MAPPED else []
    layers.append(Layer.FILE)
    layers += [Layer.ENVIRONMENT] if key.env else []
    return layers + ([Layer.COMMAND_LINE] if key.cli else [])


def said_by(key: Key, said: dict[Layer, Any]) -> tuple[Outcome, dict[Layer, str]]:
    """Launch with a value from each layer; return the outcome and the place each value has."""
    argv: list[str] = []
    env, file, framework = {}, None, []
    # Both ends of the range rule stay out of each other's way.
    lines = {"diffusion.bd_mask_low": "bd_mask_high: 1.0, ", "diffusion.bd_mask_high": "bd_mask_low: 0.0, "}
    if Layer.FILE in said:
        *sections, name = key.path.split(".")
        file = f"{lines.get(key.path, '')}{name}: {written(said[Layer.FILE])}"
        for section in reversed(sections):
            file = f"{section}: {{{file}}}"
    elif key.path in lines:
        file = f"diffusion: {{{lines[key.path]}}}"
    if Layer.ENVIRONMENT in said:
        env[str(key.env)] = written(said[Layer.ENVIRONMENT])
    if Layer.COMMAND_LINE in said:
        argv.append(f"{key.cli}={written(said[Layer.COMMAND_LINE])}")
    if Layer.FRAMEWORK in said:
        framework.append(FrameworkValue(key.path, said[Layer.FRAMEWORK], "--theirs"))
    name = key.path.rpartition(".")[2]
    column = (file or "").find(f"{name}: ") + len(name) + 3
    places = {
        Layer.DEFAULT: "",
        Layer.FRAMEWORK: "--theirs",
        Layer.FILE: f"turbo.yaml:1:{column}",
        Layer.ENVIRONMENT: str(key.env),
        Layer.COMMAND_LINE: str(key.cli),
    }
    return launch(argv, file=file, env=env, framework=framework), places


@pytest.mark.parametrize("key", FILE_KEYS, ids=lambda key: key.path)
def test_the_highest_layer_that_speaks_wins(key: Key) -> None:
    """For every subset of the layers that can set a key: value, layer and exact place of the highest."""
    layers = setting_layers(key)
    values = itertools.cycle(values_of(key))
    for count in range(len(layers) + 1):
        for subset in itertools.combinations(layers, count):
            said = {layer: next(values) for layer in subset}
            done, places = said_by(key, said)
            winner = max(subset, default=Layer.DEFAULT)
            value = said.get(winner, key.default)
            found = done[key.path]
            assert (value, type(value)) == (found, type(found)), (said, done.errors)
            assert done.config is not None
            assert (winner, places[winner]) == done.config.origin(key.path)


@pytest.mark.parametrize("key", FILE_KEYS, ids=lambda key: key.path)
def test_every_value_of_a_higher_layer_beats_every_value_of_a_lower_one(key: Key) -> None:
    """Falsy values, the default itself, and null where it is a value, all win."""
    layers = setting_layers(key)
    for low, high in itertools.pairwise(layers):
        for beaten, value in itertools.product(values_of(key), repeat=2):
            done, _ = said_by(key, {low: beaten, high: value})
            assert value == done[key.path], (low, beaten, high, value)
            assert done.config is not None
            assert high is done.config.origin(key.path).layer


def test_reported_cases_of_lost_values() -> None:
    """Values that other tools lose between their layers."""
    cases: list[tuple[str, list[str], dict[str, str], str, Any, str]] = [
        (
            "mtp: {enabled: true}",
            ["--tt_enable_mtp", "false"],
            {},
            "mtp.enabled",
            False,
            "command line --tt_enable_mtp",
        ),
        (
            "diffusion: {cap_lambda: 2.0}",
            ["--tt_cap_lambda", "0"],
            {},
            "diffusion.cap_lambda",
            0.0,
            "command line --tt_cap_lambda",
        ),
        ("mtp: {log_loss: true}", [], {}, "mtp.log_loss", True, "file turbo.yaml:1:17"),
        (
            "loss_chunk: {chunk_size: 512}",
            ["--tt_loss_chunk_size", "null"],
            {},
            "loss_chunk.chunk_size",
            None,
            "command line --tt_loss_chunk_size",
        ),
        ("loss_chunk: {chunk_size: 512}", [], {}, "loss_chunk.chunk_size", 512, "file turbo.yaml:1:26"),
        (
            "mfu: {enabled: true}",
            [],
            {"TORCH_TURBO_LOG_MFU": "false"},
            "mfu.enabled",
            False,
            "environment TORCH_TURBO_LOG_MFU",
        ),
        ("gbs: 4", [], {"TORCH_TURBO_GBS": "null"}, "gbs", None, "environment TORCH_TURBO_GBS"),
        ("gbs: null", [], {}, "gbs", None, "file turbo.yaml:1:6"),
        ("mixed_precision: bf16", ["--tt_gbs", "4"], {}, "mixed_precision", "bf16", "file turbo.yaml:1:18"),
        (
            "",
            ["--tt_mixed_precision", "null"],
            {"TORCH_TURBO_MIXED_PRECISION": "bf16"},
            "mixed_precision",
            None,
            "command line --tt_mixed_precision",
        ),
    ]
    for file, argv, env, key, value, place in cases:
        done = launch(argv, file=file, env=env)
        assert (value, place) == (done[key], done.place(key)), (file, argv, env)


def test_a_replaced_framework_value_is_reported_once_with_both_places() -> None:
    """What the user told the framework does not vanish in silence."""
    said = [
        FrameworkValue("mixed_precision", "bf16", "--bf16"),
        FrameworkValue("gbs", 4, "--gradient_accumulation_steps"),
    ]
    done = launch(["--tt_mixed_precision", "fp32"], env={"TORCH_TURBO_GBS": "8"}, framework=said)
    assert [
        "mixed_precision: --bf16 asked the framework for bf16; --tt_mixed_precision sets fp32, which holds",
        "gbs: --gradient_accumulation_steps asked the framework for 4; TORCH_TURBO_GBS sets 8, which holds",
    ] == done.warnings
    assert done.config is not None
    assert said == list(done.config.overridden)


def test_an_agreeing_or_unopposed_framework_value_is_not_reported() -> None:
    """Saying the same thing twice needs no warning."""
    said = [FrameworkValue("mixed_precision", "bf16", "--bf16"), FrameworkValue("gbs", 4, "--steps")]
    done = launch(["--tt_mixed_precision", "bf16"], framework=said)
    assert ([], "command line --tt_mixed_precision", "framework --steps") == (
        done.warnings,
        done.place("mixed_precision"),
        done.place("gbs"),
    )
    assert done.config is not None
    assert () == done.config.overridden


def test_replacing_a_value_of_our_own_is_not_reported() -> None:
    """Higher layers are there to replace lower ones."""
    done = launch(["--tt_gbs", "8"], file="gbs: 4", env={"TORCH_TURBO_GBS": "6"})
    assert done.config is not None
    assert ([], ()) == (done.warnings, done.config.overridden)


def test_a_framework_null_is_a_value() -> None:
    """None beats the default and is beaten by every layer of ours."""
    said = [FrameworkValue("loss_chunk.chunk_size", None, "--theirs")]
    assert (None, "framework --theirs") == (
        launch(framework=said)["loss_chunk.chunk_size"],
        launch(framework=said).place("loss_chunk.chunk_size"),
    )
    assert 8 == launch(file="loss_chunk: {enabled: true, chunk_size: 8}", framework=said)["loss_chunk.chunk_size"]


def test_a_bad_framework_value_is_an_error_with_its_place() -> None:
    """What an adapter maps is checked like everything else."""
    with pytest.raises(ConfigError) as caught:
        build_from_args(framework=[FrameworkValue("gbs", 0, "--theirs")])
    assert "--theirs: gbs: expected at least 1, got integer 0" == str(caught.value)


def test_the_environment_can_be_handed_over() -> None:
    """build_from_args() reads the mapping it is given instead of the process's own."""
    assert 4 == build_from_args(environ={"TORCH_TURBO_GBS": "4"}).gbs
    assert None is build_from_args(environ={}).gbs


def test_changed_lists_what_differs_from_the_defaults() -> None:
    """In the schema's order, with origins, inputs of the launch included; a value equal to the default is no change."""
    done = launch(["--tt_profiling", "--tt_sp_size", "1", "--tt_enable_mtp"], file="gbs: 4")
    assert done.config is not None
    assert [
        ("gbs", 4, (Layer.FILE, "turbo.yaml:1:6")),
        ("mtp.enabled", True, (Layer.COMMAND_LINE, "--tt_enable_mtp")),
        ("config_path", "turbo.yaml", (Layer.COMMAND_LINE, "--tt_config")),
        ("profiling", True, (Layer.COMMAND_LINE, "--tt_profiling")),
    ] == done.config.changed()


def test_configurations_are_equal_when_their_keys_are() -> None:
    """Wherever the values came from, and whatever the launch was; they are frozen."""
    one, other = launch(["--tt_gbs", "4", "--tt_profiling"]), launch(file="gbs: 4")
    assert one.config == other.config
    assert one.config != launch(["--tt_gbs", "5"]).config
    assert one.config is not None
    with pytest.raises(AttributeError):
        one.config.gbs = 8  # type: ignore[misc]
    with pytest.raises(AttributeError):
        one.config.mtp.enabled = True  # type: ignore[misc]
    with pytest.raises(KeyError):
        one.config.get("mtp.nope")
