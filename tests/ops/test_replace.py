"""Exchange in instances and undo: classes, modules and everybody else's models stay as they are."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import pytest
from torch import nn

from torchturbo.ops.replace import Attribute, innermost, remove_all, replace_forward, with_globals


def step(x: int) -> int:
    return x + 1


def decorated(function: Any) -> Any:
    @wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return 10 * function(*args, **kwargs)

    return around


@decorated
@decorated
def two_steps(x: int, *, offset: int = 5) -> int:
    """Take two steps."""
    return step(step(x)) + offset


def test_a_copy_sees_another_global_under_its_decorators() -> None:
    """And the original goes on seeing its own."""
    copy_of = with_globals(two_steps, {"step": lambda x: x - 1})

    assert 100 * (7 + 2 + 5) == two_steps(7)
    assert 100 * (7 - 2 + 5) == copy_of(7)
    assert 100 * (7 - 2 + 1) == copy_of(7, offset=1)
    assert "two_steps" == copy_of.__name__ and two_steps.__doc__ == copy_of.__doc__
    assert innermost(copy_of).__code__ is innermost(two_steps).__code__


def test_a_decorator_that_hides_its_function_is_an_error() -> None:
    """Instead of a copy that calls the original."""

    def hidden() -> int:
        return 1

    hidden.__wrapped__ = step  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="wrapped by a decorator that hides it"):
        with_globals(hidden, {})


class Doubler(nn.Module):
    def forward(self, x: int) -> int:
        return 2 * x


def test_a_copy_of_a_module_computes_with_itself() -> None:
    """A forward bound to the original would train the wrong weights."""
    module = Doubler()
    module.factor = 3
    replace_forward(module, lambda self, x: self.factor * x)
    twin = copy.deepcopy(module)
    twin.factor = 5

    assert (3, 5, 2) == (module(1), twin(1), Doubler()(1))


def test_undo_brings_back_what_was_there() -> None:
    """In the reverse order, and not over somebody else's later change."""
    module = Doubler()
    before = dict(vars(module))
    first, second = (replace_forward(module, lambda self, x, at=at: at) for at in (1, 2))
    remove_all([first, second])
    assert before == dict(vars(module)) and "forward" not in vars(Doubler()) and 2 == module(1)

    handle = replace_forward(module, lambda self, x: 0)
    theirs = Attribute(module, "forward", lambda x: 7)
    handle.remove()
    assert 7 == module(1)
    theirs.remove()
