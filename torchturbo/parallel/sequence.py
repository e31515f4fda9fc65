"""Sequence parallelism after DeepSpeed-Ulysses: several ranks share the sequences of one micro-batch.

It stands inside the model, so that whoever calls it has whole batches: every rank of a group is called with the same
micro-batch. A hook before the model's forward keeps this rank's part of each sequence; attention exchanges parts of
sequences for parts of heads and back; where nothing is differentiated, a hook after the forward joins what the ranks
computed. In training each rank's loss is its share of the sum, and its logits are those of its part.

https://arxiv.org/abs/2309.14509. What a model must be like stands in :mod:`torchturbo.parallel.sequence_check`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchturbo.ops.replace import Handle, remove_all
from torchturbo.ops.switches import ATTENTION, Kept, configurations
from torchturbo.parallel import sequence_inputs as inputs
from torchturbo.parallel.all_to_all import gathered
from torchturbo.parallel.attention_masks import FullMasks, finds_documents
from torchturbo.parallel.ulysses import NAME, SHARED, MicroBatch, attention


class SequenceParallel:
    """Sequence parallelism of one model over one group of ranks.

    Parameters
    ----------
    group
        The ranks that share sequences; rank r of it computes part r.
    averaged
        Returns whether the loss of a forward that is not differentiated is one whose mean over the ranks is the loss
        (the normaliser makes it so); else the ranks' losses are its summands.

    """

    def __init__(self, group: dist.ProcessGroup, averaged: Callable[[], bool] = lambda: False) -> None:
        self.group, self.averaged = group, averaged
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.joins_outputs = True
        """Whether outputs are joined where nothing is differentiated; an evaluation of the loss alone needs none."""
        self.inner = "eager"
        """Name of the attention that the model had."""
        self._configs: list[Any] = []
        self._handles: list[Handle] = []
        self._random, self._finds_documents = False, True
        self._compared = False

    def install(self, model: nn.Module, base: nn.Module) -> None:
        """Put sequence parallelism into a model.

        ``base`` is the Transformers model; ``model`` the module that is called (another one where PEFT wraps it).
        Install it after the normaliser, whose hook must run first.
        """
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register(NAME, attention)
        config: Any = base.config
        self.inner = config._attn_implementation or "eager"
        self._configs = list(configurations(base))
        self._random = uses_dropout(model, config)
        self._finds_documents = finds_documents(base)
        body: Any = getattr(base, "base_model", base)
        inside = Inside(self)
        self._handles = [
            *(Kept(config, ATTENTION) for config in self._configs),
            model.register_forward_pre_hook(Before(self, base), with_kwargs=True),
            model.register_forward_hook(After(self), with_kwargs=True, always_call=True),
            body.register_forward_pre_hook(inside, with_kwargs=True),
            body.register_forward_hook(inside.leave, with_kwargs=True, always_call=True),
        ]
        self.switch(NAME)

    def remove(self) -> None:
        """Take it out again."""
        remove_all(self._handles)
        self._handles = []

    def switch(self, name: str) -> None:
        """Let attentions call a function by its name."""
        for config in self._configs:
            vars(config)[ATTENTION] = name

    def micro_batch(self, given: Mapping[str, Any]) -> MicroBatch:
        """Return what attentions must know of a whole micro-batch, the arguments of a forward.

        Raises
        ------
        ValueError
            An argument can't be split.
        RuntimeError
            The ranks of the group got different micro-batches.

        """
        tokens = inputs.tokens_of(given)
        rows, length = tokens.shape[:2]
        inputs.refuse(given, rows, length)
        if not self._compared:
            self._compare(tokens)
            self._compared = True
        padded = math.ceil(length / self.size) * self.size
        positions = inputs.counted_on(inputs.positions_of(given, tokens), padded)
        mask = given.get("attention_mask")
        masks = FullMasks(self._configs[0], mask, positions, length, padded, self._finds_documents)
        return MicroBatch(self.group, self.size, self.rank, rows, length, padded, positions, masks, self.inner)

    def _compare(self, tokens: Tensor) -> None:
        """Raise on every rank where the ranks got different micro-batches [B, S, ...]. A collective, once a model."""
        flat = tokens.detach().flatten().float()
        sums = [flat.sum(), (flat * torch.arange(len(flat), device=flat.device)).sum()]
        seen = torch.stack([*sums, *(flat.new_tensor(size) for size in tokens.shape[:2])])
        every = gathered(seen[None], self.group, 0)
        if not torch.equal(every, every[:1].expand_as(every)):
            raise RuntimeError(
                "the ranks of a sequence-parallel group got different micro-batches, and need the same one:"
                f" give rank r the data of rank r // {self.size} of {dist.get_world_size() // self.size}"
            )

    def enter_dropout(self, batch: MicroBatch, device: torch.device) -> None:
        """Let dropout differ between the ranks for one forward: they have different tokens and heads of one sequence.

        The seed is drawn from this process's generator. That stays the same on all ranks of a group, for what they
        must shuffle alike, and is all that a checkpoint has to keep.
        """
        seed = int(torch.randint(2**62, ()).item()) + self.rank
        for module in [torch.random, *([torch.get_device_module(device)] if device.type != "cpu" else [])]:
            batch.generators.append((module, module.get_rng_state()))
            module.manual_seed(seed)

    def leave_dropout(self, batch: MicroBatch) -> None:
        """Put the generators back as they were."""
        while batch.generators:
            module, state = batch.generators.pop()
            module.set_rng_state(state)

    def joined(self, batch: MicroBatch, output: Any) -> Any:
        """Return a model's output for the whole micro-batch, from the outputs of the ranks' parts. A collective."""
        if isinstance(output, Mapping):
            for name, value in list(output.items()):
                output[name] = self._joined(batch, value)  # type: ignore[index]
            return output
        return self._joined(batch, output)

    def _joined(self, batch: MicroBatch, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._joined(batch, item) for item in value)
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0:
            total = value.detach().clone()
            dist.all_reduce(total, group=self.group)
            return total / self.size if self.averaged() else total
        if not self.joins_outputs or value.shape[:2] != (batch.rows, batch.local):
            return value
        return gathered(value, self.group, 1)[:, : batch.length]


def uses_dropout(model: nn.Module, config: Any) -> bool:
    """Return whether a model draws random numbers in training."""
    layers = any(
        getattr(module, "p", 0) for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)
    )
    named = (value for name, value in vars(config).items() if "drop" in name or "jitter" in name)
    return layers or any(isinstance(value, float) and value for value in named)


class Before:
    """The hook before a model's forward: it keeps this rank's part. In a copy of the model it is :class:`Plain`."""

    def __init__(self, sequence: SequenceParallel, base: nn.Module) -> None:
        self.sequence = sequence
        self._names = list(inspect.signature(base.forward).parameters)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = self._named(module, args, kwargs)
        if inputs.generates(given):
            self.sequence.switch(self.sequence.inner)
            return None
        self.sequence.switch(NAME)
        batch = self.sequence.micro_batch(given)
        if module.training and self.sequence._random:
            self.sequence.enter_dropout(batch, inputs.tokens_of(given).device)
        return (), inputs.split(given, batch)

    def _named(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        own = list(inspect.signature(module.forward).parameters)
        return {**dict(zip(self._names if "args" in own else own, args, strict=False)), **kwargs}

    def __reduce__(self) -> Any:
        return Plain, (self.sequence.inner,)


class After:
    """The hook after a model's forward: it joins what is not differentiated. In a copy of the model it does nothing."""

    def __init__(self, sequence: SequenceParallel | None = None) -> None:
        self.sequence = sequence

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        if self.sequence is None:
            return None
        batch: MicroBatch | None = kwargs.get(SHARED)
        if batch is None:  # a step of generation
            self.sequence.switch(NAME)
            return None
        self.sequence.leave_dropout(batch)
        if torch.is_grad_enabled() or output is None:  # None: an error is on its way
            return None
        return self.sequence.joined(batch, output)

    def __reduce__(self) -> Any:
        return After, ()


class Inside:
    """Hooks around a model's backbone, where the choice of operators may switch attention for a forward.

    What it switches to is what runs on whole sequences; attention itself stays with sequence parallelism, also after
    the forward: layers that are recomputed in backward ask for it again.
    """

    def __init__(self, sequence: SequenceParallel | None = None) -> None:
        self.sequence = sequence

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        batch: MicroBatch | None = kwargs.get(SHARED)
        if self.sequence is None or batch is None:
            return
        chosen = vars(self.sequence._configs[0])[ATTENTION]
        if chosen != NAME:
            batch.inner = chosen
            self.sequence.switch(NAME)

    def leave(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Have attention back after the forward."""
        if self.sequence is not None and SHARED in kwargs:
            self.sequence.switch(NAME)

    def __reduce__(self) -> Any:
        return Inside, ()


class Plain:
    """What :class:`Before` is in a copy or a pickle of a model: it gives the copy its own attention back."""

    def __init__(self, inner: str) -> None:
        self.inner = inner

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.restore(module)

    def restore(self, module: nn.Module) -> None:
        """Let attentions call what they called before there was sequence parallelism."""
        for config in configurations(module):
            if vars(config).get(ATTENTION) == NAME:
                vars(config)[ATTENTION] = self.inner


def remove(model: nn.Module, base: nn.Module) -> None:
    """Take sequence parallelism out of a model that has it, or is the copy of one."""
    for module in dict.fromkeys((model, base)):
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, Before):
                hook.sequence.remove()
            elif isinstance(hook, Plain):
                hook.restore(base)
                _forget(model)
                _forget(base)
                _forget(getattr(base, "base_model", base))


def _forget(module: Any) -> None:
    """Remove the hooks of a copy, for which there are no handles."""
    kinds = (Before, After, Inside, Plain)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds) or isinstance(getattr(hook, "__self__", None), kinds):
                for known in (
                    hooks,
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    known.pop(key, None)
