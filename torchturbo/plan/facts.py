"""What a plan needs of a model on the meta device: its parameters as FSDP2 would split them, and its units of sharding.

The rules are the sharding's own: its units, its choice of an expert parameter's dimension, the steps that freeze
parameters and choose their format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from torchturbo.engine.backends.fsdp2.prefetch import Layer, layers_of
from torchturbo.engine.backends.fsdp2.shard import expert_shard_dim
from torchturbo.engine.backends.fsdp2.units import Units, find_units
from torchturbo.optim.groups import matrices
from torchturbo.plan.memory import Weight

if TYPE_CHECKING:
    from torchturbo.engine.context import Context


class Facts(NamedTuple):
    """A model in numbers."""

    weights: tuple[Weight, ...]
    layers: tuple[Layer, ...]
    """In the order in which they run."""
    embeddings: str
    """Name of the unit of the input embeddings; empty where they are in the root's."""
    matrices: frozenset[str]
    """Names of the parameters that Muon would update."""
    buffers: int
    """Bytes of what every rank holds whole, such as the frequencies of rotary embeddings."""

    @property
    def parameters(self) -> int:
        """Return the elements of all parameters."""
        return sum(weight.numel for weight in self.weights)

    @property
    def trained(self) -> int:
        """Return the elements of those that are trained."""
        return sum(weight.numel for weight in self.weights if weight.trained)


def facts_of(model: nn.Module, context: Context) -> Facts:
    """Return the facts of a model whose parameters are frozen and have their format already."""
    units = find_units(model)
    names = {id(module): name for name, module in model.named_modules()}
    embeddings = "" if units.embeddings is None else names[id(units.embeddings)]
    experts = {name for layer in units.layers for name, _ in layer.experts}
    inside = _unit_of_parameters(units, names)
    weights = [
        _weight(name, parameter, inside.get(id(parameter), ""), experts, context)
        for name, parameter in model.named_parameters()
    ]
    muon = {id(matrix.parameter) for matrix in matrices(model)}
    hidden = frozenset(name for name, parameter in model.named_parameters() if id(parameter) in muon)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return Facts(tuple(weights), tuple(layers_of(units)), embeddings, hidden, buffers)


def _unit_of_parameters(units: Units, names: dict[int, str]) -> dict[int, str]:
    """Return the unit of each parameter, by its identity; the first that is sharded takes it."""
    found: dict[int, str] = {}
    for module in units.modules():
        name = "" if module is units.root else names[id(module)]
        for parameter in module.parameters():
            found.setdefault(id(parameter), name)
    return found


def _weight(name: str, parameter: nn.Parameter, unit: str, experts: set[str], context: Context) -> Weight:
    shape, size, trained = tuple(parameter.shape), parameter.element_size(), parameter.requires_grad
    if not context.sharded:
        return Weight(name, shape, size, trained, unit)
    plan = context.plan
    if unit not in experts:
        return Weight(name, shape, size, trained, unit, 0, plan.world_size)
    dim = expert_shard_dim(shape, plan.ep_fsdp_size, plan.ep_size)
    return Weight(name, shape, size, trained, unit, dim, plan.ep_fsdp_size, plan.ep_size)
