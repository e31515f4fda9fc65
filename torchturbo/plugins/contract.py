"""The plugin contract: the hooks, in the order in which a run comes by them, and what a hook may look at.

A plugin file registers one class or several::

    from torchturbo.plugins import Plugin, register

    @register()
    class Shout(Plugin):
        def step_end(self, run):
            print("step", run.step)

The engine's own observers (profiler, memory snapshot, utilisation) are plugins too. This module imports no torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchturbo.engine.config import EngineConfig
    from torchturbo.errors import Problem
    from torchturbo.runtime import Runtime

FRAMEWORKS = ("hf_trainer", "llama_factory")
"""Names by which a plugin can ask for one framework."""


@dataclass
class Run:
    """What a hook may look at: one training run on one rank."""

    config: EngineConfig
    """The effective configuration."""
    runtime: Runtime
    """The device this rank computes on."""
    world_size: int = 1
    rank: int = 0
    output_dir: Path = field(default_factory=Path)
    framework: str = FRAMEWORKS[0]
    """One of :data:`FRAMEWORKS`."""
    trainer: Any = None
    """The framework's own trainer; what it offers differs between frameworks and their versions."""
    model: Any = None
    """The model that is trained, not wrapped for distribution; None until it is built."""
    step: int = 0
    """Optimizer steps that are finished, those before a resume included."""
    error: BaseException | None = None
    """What ended the run before its last step; None while it goes on, and in :meth:`Plugin.end` of a whole one."""


class Origin(NamedTuple):
    """Where a plugin comes from: what a launch named, and what the record of a run keeps of it."""

    given: str
    """As on the command line: ``PATH.py:CONFIG`` or ``NAME:CONFIG``."""
    sha256: str
    """Of the file with its code."""
    settings: Mapping[str, Any] | None
    """As they were handed to the plugin."""


class Plugin:
    """Base of every plugin; each hook does nothing unless it is overridden.

    Hooks are called on every rank, at the same place of the run, plugins in the order in which they were given. A
    hook that talks to other ranks must do so on all of them. An exception ends the run and names plugin and hook.

    Parameters
    ----------
    settings
        The plugin's own configuration file as one mapping, checked and completed by ``settings_schema``; None where
        none was given. ``self.settings`` is a mapping in both cases: without a file it holds the schema's defaults.

    """

    name: ClassVar[str] = ""
    """How messages call the plugin; the class's name where it is empty."""
    settings_schema: ClassVar[Mapping[str, Any] | None] = None
    """JSON Schema (draft 2020-12) of the configuration file; without one anything is handed on as it is.

    Settings are written to the record of the run; what the schema marks as ``writeOnly`` is not.
    """
    origin: Origin | None = None
    """Set by the loader once the plugin is made; None for one that code made."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        from torchturbo.plugins.schema import filled

        self.settings: Mapping[str, Any] = filled(settings or {}, self.settings_schema or {})
        self._given: Mapping[str, Any] = copy.deepcopy(
            self.settings
        )  # for the record of a run, whatever is made of them

    # ---- while the run is set up ----

    def problems(self, model: nn.Module, run: Run) -> Sequence[str | Problem]:
        """Return what keeps the plugin from working in this run, an empty list for nothing: the run then stops.

        It is told together with everything else that is wrong. ``torchturbo train`` asks before it reads a weight, the
        model being on the meta device, and again of the model itself: look at its configuration, modules and shapes,
        at ``run.config``, and change nothing. ``run.model`` and ``run.trainer`` are None or not set up.

        Returns
        -------
        Sequence
            Messages, or a :class:`torchturbo.errors.Problem` for one with a place and a remedy of its own.

        """
        return ()

    def model_built(self, model: nn.Module, run: Run) -> None:
        """The model is there with its weights, and the engine has not touched it.

        Called for each model that the engine prepares: where the trainer makes models itself (``model_init``), that is
        one when it is set up and one for each ``train()``. A model that another trainer has taken comes a second time.
        """

    def before_shard(self, model: nn.Module, run: Run) -> None:
        """Every step but the sharding is done: the last moment at which parameters are whole on every rank.

        Called as often as :meth:`model_built`.
        """

    def optimizer_built(self, optimizer: Optimizer, run: Run) -> None:
        """The optimizer is there, its schedule is not: groups and rates can still be changed."""

    def load_checkpoint(self, folder: Path, run: Run) -> None:
        """A run is resumed: read back what :meth:`save_checkpoint` wrote into the folder."""

    # ---- each optimizer step ----

    def step_begin(self, micro_batches: Sequence[Mapping[str, Any]], run: Run) -> None:
        """An optimizer step begins; these are the rank's micro-batches, on the device: one at least.

        Batches may be changed; their number may not.
        """

    def loss_weight(self, batch: Mapping[str, Any], run: Run) -> Tensor | None:
        """Return a micro-batch's weight in :meth:`loss_term`, a scalar tensor: the number of tokens it sums over.

        Weights are summed over the accumulation window and over all ranks; the term is divided by that sum. A plugin
        that does not override this has a term that is a mean over micro-batches and ranks.
        """
        return None

    def loss_term(self, outputs: Any, batch: Mapping[str, Any], run: Run) -> Tensor | None:
        """Return what to add to the loss of a micro-batch, a scalar tensor with its graph, not divided by anything.

        Parameters
        ----------
        outputs
            What the model returned; ``logits`` [B, T, V] is None where the loss is computed in chunks.
        batch
            What the model was called with: ``input_ids`` [B, T], ``labels`` [B, T], and more.

        """
        return None

    def step_end(self, run: Run) -> None:
        """An optimizer step is done; ``run.step`` counts it already."""

    # ---- now and then ----

    def log(self, metrics: dict[str, float], run: Run) -> None:
        """Training metrics are about to be logged, also to TensorBoard and the like: add numbers, or read them."""

    def paused(self, run: Run) -> None:
        """The loop leaves training, to evaluate or to save; also before an evaluation or prediction outside of one."""

    def resumed(self, run: Run) -> None:
        """What began with :meth:`paused` is over, also by an error."""

    def save_checkpoint(self, folder: Path, run: Run) -> None:
        """A checkpoint is being written: put into its folder what a resumed run needs.

        The folder gets its final name when every rank is done with it, so nothing half-written is ever resumed.
        Ranks share the folder: each uses file names of its own, or only rank 0 writes.

        With ``push_to_hub`` it is not so: the folder has its final name already, and its upload has begun, so that what
        is written here may be missing on the Hub.
        """

    def end(self, run: Run) -> None:
        """A training is over, also by an error or Ctrl-C: called once for each ``train()``, of every plugin.

        So it is when a trainer can't be set up after its plugins were shown the model. An exception here ends nothing:
        the other plugins are told too and the model is saved, and then it is reported.
        """


HOOKS = tuple(name for name in vars(Plugin) if inspect.isfunction(vars(Plugin)[name]) and not name.startswith("_"))
"""Names of all hooks, in the order in which a run comes by them."""


@dataclass(frozen=True)
class Registration:
    """A plugin class and the framework that it is for."""

    plugin: type[Plugin]
    framework: str | None
    """One of :data:`FRAMEWORKS`; None for any."""


REGISTERED: list[Registration] = []
"""Everything that plugin files and packages of this process have registered so far."""

P = TypeVar("P", bound=type[Plugin])


def register(framework: str | None = None) -> Callable[[P], P]:
    """Register a plugin class, for one framework or for any.

    Raises
    ------
    ValueError
        If there is no such framework.
    TypeError
        If it is put above a class without its parentheses.

    """
    if isinstance(framework, type):
        raise TypeError("register is called with the class itself; write @register()")
    if framework is not None and framework not in FRAMEWORKS:
        raise ValueError(f"{framework!r} is no framework; expected one of {', '.join(FRAMEWORKS)}")

    def keep(plugin: P) -> P:
        REGISTERED.append(Registration(plugin, framework))
        return plugin

    return keep
