"""Block diffusion of one model: its forward takes doubled batches, and CAP's term where that is wanted.

A hook before everything that splits a batch turns the documents of a doubled batch into the mask that the model's
attention takes. The loss is the model's own cross-entropy, of the noisy half alone and not shifted.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchturbo.objectives.chunked import ChunkedHead, head_of
from torchturbo.objectives.diffusion.cap import METRIC, Cap, Looking
from torchturbo.objectives.diffusion.mask import attention_mask, doubled_rule
from torchturbo.objectives.diffusion.noise import DOUBLED, Doubled
from torchturbo.objectives.graphs import outside_graphs
from torchturbo.objectives.normalise import IGNORE_INDEX, Normaliser, Term
from torchturbo.ops.replace import Attribute, Handle, remove_all
from torchturbo.parallel.ulysses import NAME as SHARING


class BlockDiffusion:
    """Block diffusion of one model.

    Parameters
    ----------
    model
        The module that is called; install this before sequence parallelism.
    base
        The Transformers model; another one where PEFT wraps it.
    dtype
        The number format that the forward computes in.
    shared
        Whether ranks share its sequences.

    """

    def __init__(self, model: nn.Module, base: nn.Module, dtype: torch.dtype, *, shared: bool = False) -> None:
        self.base, self.dtype, self.shared = base, dtype, shared
        self.kind = attention_of(base)
        """Name of the model's attention."""
        self.real: Tensor | None = None
        """Which tokens of the doubled batch under way are no padding [B, 2L]."""
        self.probed = False
        """Whether it is known that the model keeps to the masks it is given."""
        self.every_row = False
        """Whether the model wants a mask for each row, also where all rows have the same."""
        self._cap: Cap | None = None
        self._selects = "logits_to_keep" in inspect.signature(base.forward).parameters
        before: Any = _Before(self)
        self._handles: list[Handle] = []
        self._handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
        # After the normaliser's hook, in which terms read what is forgotten here; also where a forward fails.
        self._handles.append(model.register_forward_hook(_After(self), always_call=True))

    def add_cap(self, normaliser: Normaliser, coefficient: float) -> None:
        """Add CAP's term to the losses of the model."""
        cap, loss = Cap(self.base), getattr(self.base, "loss_function", None)
        self._cap = cap
        self._handles.append(Attribute(loss, "wrapped", Looking(cap, loss.wrapped)))  # type: ignore[union-attr]
        normaliser.terms.append(Term(METRIC, cap.value, coefficient=coefficient, pooled=True))

    def forget(self) -> None:
        """Let go of what belongs to one forward, and of its graph."""
        self.real = None
        if self._cap is not None:
            self._cap.forget()

    def remove(self) -> None:
        """Take it out of the model."""
        self.forget()
        remove_all(self._handles)
        self._handles = []

    def arguments(self, module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's own forward for those of a doubled batch."""
        doubled: Doubled = given[DOUBLED]
        made = {name: value for name, value in given.items() if name != DOUBLED}
        documents: Tensor = made["attention_mask"]
        self.real = documents.ne(0)
        made["attention_mask"] = self._mask(documents, doubled)
        if made.get("labels") is None:
            return made
        if self._selects and not self.shared and not self._chunked(module):
            made["logits_to_keep"] = torch.arange(doubled.length, device=documents.device)
            return made
        for name in ("labels", "shift_labels"):  # a chunked head skips rows without a target by itself
            made[name] = functional.pad(made[name], (0, doubled.length), value=IGNORE_INDEX)
        return made

    def _mask(self, documents: Tensor, doubled: Doubled) -> Any:
        kind, device = attention_of(self.base), documents.device
        kind = self.kind if kind == SHARING else kind
        length = torch.tensor(doubled.length, device=device) if kind == "flex_attention" else doubled.length
        rule = doubled_rule(None if doubled.whole else documents, length, doubled.block_size)
        rows = 1 if doubled.whole else len(documents)
        mask = attention_mask(kind, rule, rows, 2 * doubled.length, self.dtype, device)
        # A view: no row of it takes memory.
        return mask.expand(len(documents), -1, -1, -1) if self.every_row and isinstance(mask, Tensor) else mask

    def _chunked(self, module: nn.Module) -> bool:
        training = module.training and torch.is_grad_enabled()
        return training and isinstance(head_of(self.base), ChunkedHead)


def attention_of(base: nn.Module) -> str:
    """Return the name of the attention that a model has."""
    config: Any = getattr(base, "config", None)
    return getattr(config, "_attn_implementation", None) or "eager"


class _Before:
    """The hook before a model's forward; in a copy or a pickle of the model it does nothing."""

    def __init__(self, diffusion: BlockDiffusion | None = None) -> None:
        self.diffusion = diffusion

    # A mask is made once a batch, by a rule that is no part of the model: it stays out of compiled graphs.
    @outside_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.diffusion is None:
            return None
        self.diffusion.forget()
        if DOUBLED not in kwargs:
            return None
        return args, self.diffusion.arguments(module, kwargs)

    def __reduce__(self) -> Any:
        return _Before, ()


class _After:
    """The hook after a model's forward, which forgets it; in a copy or a pickle of the model it does nothing."""

    def __init__(self, diffusion: BlockDiffusion | None = None) -> None:
        self.diffusion = diffusion

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.diffusion is not None:
            self.diffusion.forget()

    def __reduce__(self) -> Any:
        return _After, ()
