"""The part of a plan that a model on the meta device tells: bytes of each rank, the order of gathers, advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchturbo.engine.backends.fsdp2.offload import choose
from torchturbo.engine.backends.fsdp2.prefetch import prefetch_lists
from torchturbo.engine.backends.fsdp2.units import find_units
from torchturbo.engine.model import base_model
from torchturbo.engine.steps import freeze, heads, precision
from torchturbo.engine.steps.prefetch import AUTO, chosen, listed_layers
from torchturbo.objectives.diffusion.models import is_diffusion_model
from torchturbo.objectives.dspark import backbone
from torchturbo.objectives.heads import extra_heads, is_of_heads
from torchturbo.observe.objectives import trains
from torchturbo.plan import advice
from torchturbo.plan.activations import estimate
from torchturbo.plan.diffusion import doubled, mask_dtype
from torchturbo.plan.facts import Facts, facts_of
from torchturbo.plan.memory import Range, Rule, Weight, gradient_bytes, optimizer_bytes, parameter_bytes
from torchturbo.plan.optimizer import Optimizer, optimizer_of
from torchturbo.plan.report import Memory, Model, Order, Plan
from torchturbo.plan.traffic import Passing, passing

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments

    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.context import Context
    from torchturbo.engine.engine import Engine
    from torchturbo.train.arguments import DataArguments

BF16 = 2
"""Bytes of an element."""


class MicroBatch(NamedTuple):
    """What one rank forwards at once."""

    rows: int
    length: int
    """Tokens of its longest row; of a diffusion model, of both halves."""
    pair: int
    """Bytes that its attention mask takes for each pair of tokens; 0 where there is none."""
    words: str
    """What needs the mask."""

    @property
    def mask(self) -> int:
        """Return the bytes of its attention mask; without one rows attend causally."""
        return self.rows * self.length**2 * self.pair


def examine_model(
    model: nn.Module, name: str, engine: Engine, training: TrainingArguments, data: DataArguments, plan: Plan
) -> None:
    """Put what a model needs into a plan whose mesh is known; the model is used up."""
    config, context = engine.config, engine.context
    facts = settled_facts(model, config, context)
    computes_in = "bf16" if config.mixed_precision == "bf16" else "fp32"
    layers = sum(not is_of_heads(layer.name) for layer in facts.layers)
    plan.model = Model(name, type(model).__name__, facts.parameters, facts.trained, layers, computes_in)
    plan.has_experts = any(layer.experts for layer in facts.layers)
    if context.sharded and len(facts.layers) > 1:
        plan.order = order_of(model, config, context)
    optim = str(getattr(training.optim, "value", training.optim))
    optimizer = optimizer_of(facts.weights, optim, config.optimizer.name, facts.matrices, training.optim_args)
    batch = _micro_batch(model, config, context, training.per_device_train_batch_size, data)
    plan.doubled = batch.length if is_diffusion_model(model) else None
    passing_through = _passing(facts, config, plan.order) if context.sharded else Passing(0, 0)
    plan.memory = _memory(model, facts, optimizer, engine, (batch, data.cutoff_len), passing_through)
    plan.warnings += advice.of(plan, facts.weights, config)


def _micro_batch(
    model: nn.Module, config: EngineConfig, context: Context, rows: int, data: DataArguments
) -> MicroBatch:
    if is_diffusion_model(model):
        dtype = mask_dtype(base_model(model), config)
        length = doubled(data.cutoff_len, config, context.plan.sp_size)
        return MicroBatch(rows, length, 0 if dtype is None else dtype.itemsize, "of block diffusion, over both halves")
    ragged = rows > 1 or data.packing  # rows can differ in length, or several lie in one
    return MicroBatch(rows, data.cutoff_len, int(ragged), "of rows that are padded or packed")


def settled_facts(model: nn.Module, config: EngineConfig, context: Context) -> Facts:
    """Return the facts of a model on meta, after the steps that decide what is trained and in which format."""
    model.float()  # as the weights are read
    freeze.apply(model, config, context)
    heads.apply(model, config, context)
    base_model(model).float()
    if (extra := extra_heads(base_model(model))) is not None and not trains(extra, config):
        extra.requires_grad_(False)
    precision.apply(model, config, context)
    return facts_of(model, context)


def order_of(model: nn.Module, config: EngineConfig, context: Context) -> Order:
    """Return the order of gathers that the step "prefetch" would set up."""
    section = config.backend_config
    strategy: str = section.prefetch_strategy
    depths = section.forward_prefetch_depth, section.backward_prefetch_depth
    reason = ""
    units = find_units(model)
    layers = tuple(listed_layers(units, strategy, context.plan))
    if strategy == AUTO:
        strategy, reason = chosen(units, config, context.plan)
    return Order(strategy, reason, layers, prefetch_lists(layers, strategy, section.prefetch_direction, *depths))


def _passing(facts: Facts, config: EngineConfig, order: Order | None) -> Passing:
    return passing(
        facts.weights,
        facts.layers,
        order.lists if order else {},
        itemsize=BF16 if config.mixed_precision == "bf16" else None,
        reshard=config.backend_config.reshard_after_forward,
    )


def _memory(
    model: nn.Module, facts: Facts, optimizer: Optimizer, engine: Engine, run: tuple[MicroBatch, int], held: Passing
) -> Memory:
    config, context, weights = engine.config, engine.context, facts.weights
    state = None
    if (rules := optimizer.rules) is not None:
        state = Range.of(lambda rank: optimizer_bytes(weights, rules, rank), context.world_size)
    host = _on_host(config, weights, optimizer, context.world_size)
    batch, length = run
    has_draft = config.dspark.enabled and backbone.of(extra_heads(base_model(model))) is not None
    activations = estimate(model, config, context, batch.rows, length)
    return Memory(
        parameters=parameter_bytes(weights),
        gradients=gradient_bytes(weights),
        optimizer=state,
        optimizer_words=optimizer.words,
        buffers=facts.buffers,
        host=host,
        gathered=held.gathered,
        reducing=held.reducing,
        activations=activations.bytes,
        mask=batch.mask,
        mask_words=batch.words,
        reason=activations.reason,
        left_out="the blocks of the DSpark draft" if has_draft else "",
    )


def _on_host(config: EngineConfig, weights: Sequence[Weight], optimizer: Optimizer, world_size: int) -> Range:
    """Return the bytes of a rank's state that ``cpu_offload`` puts into host memory."""
    section, rules = config.backend_config.cpu_offload, optimizer.rules or (Rule(0, 0),) * len(weights)
    if not section.enabled:
        return Range(0, 0)
    pairs = {weight.name: (weight, rule) for weight, rule in zip(weights, rules, strict=True)}
    held = 0
    if section.mode == "all":
        held, moved = parameter_bytes(weights) + gradient_bytes(weights), list(pairs.values())
    else:
        sizes = {
            name: rule.copies * weight.padded * weight.itemsize if weight.trained else 0
            for name, (weight, rule) in pairs.items()
        }
        moved = [pairs[name] for name in choose(sizes, section.optimizer_memory_fraction)]
    return Range.of(lambda rank: held + sum(rule.bytes(weight, rank) for weight, rule in moved), world_size)
