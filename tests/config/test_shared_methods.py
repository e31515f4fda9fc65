"""Equality, hash and text of the configuration's dataclasses, which inherit these methods instead of generating them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, make_dataclass, replace

import pytest

from torchturbo.config.layers import Layer, Origin, Setting
from torchturbo.config.values import FrozenValues, Values
from torchturbo.engine.args import TorchTurboArgs, TurboArgSpec, get_arg_specs
from torchturbo.engine.config import EngineConfig, build_from_args
from torchturbo.generated.config import SECTION_CLASSES, RuntimeArgs

FROZEN = [*SECTION_CLASSES.values(), RuntimeArgs, EngineConfig]


@pytest.mark.parametrize("cls", FROZEN, ids=lambda cls: cls.__name__)
def test_it_behaves_as_dataclass_would_have_made_it(cls):
    made = make_dataclass(
        cls.__name__,
        [(item.name, item.type, item) for item in fields(cls)],
        frozen=True,
        kw_only=True,
    )
    ours, theirs = cls(), made()
    assert is_dataclass(cls)
    assert repr(ours) == repr(theirs).replace(made.__qualname__, cls.__qualname__)
    assert ours == cls()
    assert ours != theirs
    assert (ours == object()) is False
    for name in (fields(cls)[0].name, "something_new"):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(ours, name, None)
    with pytest.raises(FrozenInstanceError, match="cannot delete field"):
        delattr(ours, fields(cls)[0].name)
    assert copy.deepcopy(ours) == pickle.loads(pickle.dumps(ours)) == ours


@pytest.mark.parametrize("cls", list(SECTION_CLASSES.values()), ids=lambda cls: cls.__name__)
def test_equal_sections_have_equal_hashes(cls):
    assert hash(cls()) == hash(cls())
    assert len({cls(), cls()}) == 1


def test_one_field_makes_a_difference():
    config = EngineConfig()
    other = replace(config, mtp=replace(config.mtp, enabled=True))
    assert other != config
    assert hash(other) != hash(config)
    assert asdict(other)["mtp"]["enabled"] is True


def test_configurations_are_equal_wherever_their_values_come_from():
    origin = Origin(Layer.FILE, "turbo.yaml:1:6")
    told = replace(
        EngineConfig(), provenance={"gbs": Setting("gbs", None, origin)}, runtime=RuntimeArgs(profiling=True)
    )
    assert told == EngineConfig() == build_from_args(TorchTurboArgs(), environ={})
    assert hash(told) == hash(EngineConfig())
    assert "provenance" not in repr(told)


def test_arguments_are_equal_by_value_and_cannot_be_hashed():
    assert TorchTurboArgs(gbs=4) == TorchTurboArgs(gbs=4) != TorchTurboArgs(gbs=5)
    assert repr(TorchTurboArgs(gbs=4)).startswith("TorchTurboArgs(config_path=None, ")
    with pytest.raises(TypeError):
        hash(TorchTurboArgs())


def test_a_spec_can_be_compared_hashed_and_shown():
    assert get_arg_specs()[0] == replace(get_arg_specs()[0]) != get_arg_specs()[1]
    assert len(set(get_arg_specs())) == len(get_arg_specs())
    assert repr(TurboArgSpec("x")).startswith("TurboArgSpec(name='x', config_path=None, ")
    with pytest.raises(FrozenInstanceError):
        TurboArgSpec("x").name = "y"


def test_the_bases_are_in_use():
    # Without them each of these classes generates its own methods, which costs a start-up a sixth.
    for cls in FROZEN:
        assert issubclass(cls, FrozenValues)
        assert {"__eq__", "__repr__", "__hash__", "__setattr__", "__delattr__"}.isdisjoint(vars(cls))
    assert issubclass(TorchTurboArgs, Values) and "__eq__" not in vars(TorchTurboArgs)
