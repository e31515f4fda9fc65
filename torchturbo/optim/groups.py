"""Which parameter is updated by Muon and which by AdamW: by what it is in the model, not by its number of dimensions.

Muon takes the hidden matrices: weights of linear layers inside the model's layers and extra heads, and stacks of
experts. AdamW takes the rest: embeddings, heads that make logits, norms, biases, routers, convolutions, and whatever
else a family has. That is the choice of Keller Jordan (https://kellerjordan.github.io/posts/muon/) and of Moonlight (arXiv 2502.16982, section 2.3); routers are
added because their rows are experts, not features. It looks at no weight: the model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from torchturbo.engine.model import base_model
from torchturbo.objectives.heads import extra_heads
from torchturbo.optim.fused import Fused, fused_experts, fused_linear, is_class

ROUTERS = r"\w*Router\w*|\w*MoE\w*Gate|\w*TopKGating"
"""Classes of routers, as a pattern; everything inside one is AdamW's."""
ROUTER_NAMES = ("gate", "router")
"""Names of a router that is a plain linear layer, beside ``experts``."""
EXPERTS = r"\w*Experts|\w*NaiveMoe"
"""Classes that stack the weights of several experts, the second by their older name."""
HEADS = ("lm_head", "markov_w2")
"""Names of what makes logits, wherever it is: a model's head, and what a draft adds to it."""
PARAMETER_ADAPTERS = "ParamWrapper"
"""PEFT's adapters of a plain parameter: their matrices stack those of several experts along the rank."""


class Matrix(NamedTuple):
    """One parameter that Muon updates, and the linear maps in it."""

    name: str
    parameter: nn.Parameter
    """``[M, K]``, or ``[E, M, K]`` for a stack of experts."""
    fused: Fused | None = None

    @property
    def maps(self) -> int:
        """Return how many linear maps it holds."""
        experts = self.parameter.shape[0] if self.parameter.ndim == 3 else 1
        return experts * (len(self.fused.sizes) if self.fused else 1)


def matrices(model: nn.Module) -> list[Matrix]:
    """Return what Muon updates of a model, frozen or not, each parameter once."""
    layers = _layers(model)
    if (heads := extra_heads(base_model(model))) is not None:
        layers.add(id(heads))
    taken = {id(parameter) for parameter in _outer(model)}
    found = []
    for matrix in _visit(model, "", None, layers, False):
        if id(matrix.parameter) not in taken:
            taken.add(id(matrix.parameter))
            found.append(matrix)
    return found


def _layers(model: nn.Module) -> set[int]:
    """Return the ids of the modules that are layers: those Transformers checkpoints, else the entries of any list."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    entries = [entry for module in model.modules() if isinstance(module, nn.ModuleList) for entry in module]
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    known = [
        entry
        for entry in entries
        if isinstance(entry, GradientCheckpointingLayer) or names & {kind.__name__ for kind in type(entry).__mro__}
    ]
    return {id(entry) for entry in known or entries}


def _outer(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of embeddings and heads: a tied one is no hidden matrix wherever else it stands."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2] in HEADS:
            yield from module.parameters(recurse=False)


def _visit(module: nn.Module, name: str, owner: nn.Module | None, layers: set[int], inside: bool) -> Iterator[Matrix]:
    inside = inside or id(module) in layers
    own = name.rpartition(".")[2]
    if inside and (_is_router(module, own, owner) or is_class(module, PARAMETER_ADAPTERS)):
        return
    if inside:
        yield from _own_matrices(module, name, own, owner)
    for child, inner in module.named_children():
        yield from _visit(inner, f"{name}.{child}" if name else child, module, layers, inside)


def _is_router(module: nn.Module, name: str, owner: nn.Module | None) -> bool:
    return is_class(module, ROUTERS) or (name in ROUTER_NAMES and hasattr(owner, "experts"))


def _own_matrices(module: nn.Module, name: str, own: str, owner: nn.Module | None) -> Iterator[Matrix]:
    """Yield the matrices among a module's own parameters. One row or one column is a vector."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, stored [in, out]

    for attribute, parameter in module.named_parameters(recurse=False):
        full = f"{name}.{attribute}"
        if min(parameter.shape[-2:], default=0) <= 1:
            continue
        if parameter.ndim == 2 and attribute == "weight" and isinstance(module, nn.Linear | Conv1D):
            yield Matrix(full, parameter, fused_linear(owner, own, parameter))
        elif parameter.ndim == 3 and is_class(module, EXPERTS):
            fused = fused_experts(module, attribute, parameter) or fused_linear(owner, own, parameter)
            yield Matrix(full, parameter, fused)


def parameter_groups(model: nn.Module, weight_decay: float, decays: Collection[str]) -> list[dict[str, Any]]:
    """Return the parameter groups of a model for :class:`torchturbo.optim.muon.MuonAdamW`.

    Parameters
    ----------
    model
        The model, sharded or not; what is frozen is in no group.
    weight_decay
        Decoupled decay of the parameters in ``decays``; all others have none.
    decays
        Names of parameters that decay, such as ``Trainer.get_decay_parameter_names`` returns.

    Returns
    -------
    Groups with ``params``, ``weight_decay``, ``use_muon``; Muon's first. Parameters on different meshes are in different
    groups, as one fused kernel can't update both (Transformers does the same).

    """
    muon = {id(matrix.parameter) for matrix in matrices(model)}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        use_muon, decay = id(parameter) in muon, weight_decay if name in decays else 0.0
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group = {"params": [], "weight_decay": decay, "use_muon": use_muon}
        groups.setdefault((not use_muon, decay == 0.0, mesh), group)["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]


def layouts(model: nn.Module) -> dict[nn.Parameter, Fused]:
    """Return how the matrices of a model are fused, for those that are."""
    return {matrix.parameter: matrix.fused for matrix in matrices(model) if matrix.fused is not None}


def summary(model: nn.Module) -> str:
    """Return in one line how much of what is trained went where."""
    muon = [matrix for matrix in matrices(model) if matrix.parameter.requires_grad]
    taken = {id(matrix.parameter) for matrix in muon}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    maps, split = sum(matrix.maps for matrix in muon), sum(matrix.fused is not None for matrix in muon)
    fused = f", {split} fused ones split" if split else ""
    return (
        f"Muon for {_size(matrix.parameter for matrix in muon)} parameters in {maps:,} matrices{fused}; "
        f"AdamW for {_size(rest)} in {len(rest):,} tensors"
    )


def _size(parameters: Any) -> str:
    return f"{sum(parameter.numel() for parameter in parameters):,}"
