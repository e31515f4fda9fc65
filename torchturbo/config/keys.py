"""What is known of a configuration key: the records that the generated table is made of."""

from __future__ import annotations

from typing import Any, Literal

JsonType = Literal["boolean", "integer", "number", "string", "array"]


class Record:
    """A plain record of keyword arguments, whose class attributes are the defaults.

    A NamedTuple or dataclass of this many fields takes longer to define than a whole command line takes to parse,
    and every rank of a launch would pay for it.
    """

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


class Condition(Record):
    """A value that another key must have for a key to be read."""

    path: str
    allowed: tuple[Any, ...] = ()
    minimum: float | None = None

    def holds(self, value: Any) -> bool:
        """Return whether the other key's value lets the key be read."""
        if self.minimum is not None:
            return value is not None and bool(value >= self.minimum)
        return value in self.allowed

    def __str__(self) -> str:
        if self.minimum is not None:
            return f"{self.path} is at least {self.minimum}"
        return f"{self.path} is {' or '.join(shown(value) for value in self.allowed)}"


class Alias(Record):
    """A former spelling of a key, still read with a warning."""

    since: str
    removal: str
    path: str | None = None
    cli: str | None = None
    env: str | None = None


class Deprecation(Record):
    """A key that goes away."""

    since: str
    removal: str
    successor: str | None = None


class Rule(Record):
    """A relation between two keys that every configuration keeps."""

    left: str
    op: Literal["<", "<=", ">", ">="]
    right: str
    text: str


class Key(Record):
    """One configuration key, or one input of a launch (``runtime``)."""

    path: str
    """Dotted path in a configuration file; the bare name of a runtime input."""
    type: JsonType
    text: str
    default: Any
    since: str
    name: str
    """Name of its :class:`~torchturbo.engine.args.TurboArgSpec`."""
    nullable: bool = False
    null: str = ""
    """What null means."""
    choices: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """What each choice means, in the order of ``choices``."""
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    """Regular expression that each item of an array matches."""
    form: str = ""
    """How such an item is written, in words."""
    examples: tuple[Any, ...] = ()
    arg: str | None = None
    """Field of TorchTurboArgs."""
    arg_default: Any = None
    cli: str | None = None
    env: str | None = None
    metavar: str | None = None
    action: Literal["append"] | None = None
    python: Literal["LogLevel"] | None = None
    """The enumeration whose members the choices name, where the value has a Python type of its own."""
    spec_choices: bool = False
    """Whether the spec itself lists the choices."""
    runtime: bool = False
    launch_only: bool = False
    """Whether it is an option of the launcher alone, with neither field nor spec."""
    active_when: tuple[Condition, ...] = ()
    idle_silent: tuple[Any, ...] = ()
    aliases: tuple[Alias, ...] = ()
    deprecated: Deprecation | None = None
    strict_on_resume: bool = False

    @property
    def section(self) -> str:
        """Path of the section that holds the key; empty at the top level and for runtime inputs."""
        return self.path.rpartition(".")[0]

    @property
    def expectation(self) -> str:
        """What a value has to be, in words: ``integer``, ``bf16, fp32 or null``."""
        words = ", ".join(self.choices) if self.choices else {"array": "list of strings"}.get(self.type, self.type)
        if not self.nullable:
            return f"one of {words}" if len(self.choices) > 1 else words
        return f"one of {words}, null" if self.choices else f"{words} or null"


class Section(Record):
    """One object of the configuration file."""

    path: str
    """Dotted path; empty for the whole file."""
    class_name: str
    text: str
    names: tuple[str, ...]
    """Its keys and sub-sections, in the schema's order."""
    arg: str | None = None
    """Field of TorchTurboArgs that holds the whole section."""


def shown(value: Any) -> str:
    """Return a value as it is written in a configuration file: ``true``, ``null``, ``0.1``, ``bf16``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)


def type_text(key: Key) -> str:
    """Return a key's type and bounds in words: ``integer or null, at least 1``."""
    text: str = {"array": "list of strings"}.get(key.type, key.type) + (" or null" if key.nullable else "")
    if key.minimum is None:
        return text
    # Integers end where a C int does, which tells nobody anything.
    if key.maximum is None or key.type == "integer":
        return f"{text}, at least {key.minimum:g}"
    return f"{text}, {key.minimum:g} to {key.maximum:g}"
