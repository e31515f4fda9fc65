"""Data under Hugging Face's Trainer where ranks share sequences: which rows a rank gets, and what is gathered of them.

The ranks of a sequence-parallel group count as one everywhere: they get the same batches, their predictions are
gathered once, and tokens and operations are not counted for each of them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor

from torchturbo.errors import Problem
from torchturbo.ops.switches import View

if TYPE_CHECKING:
    from torchturbo.engine.config import EngineConfig
    from torchturbo.engine.engine import Engine

KEY = "parallel_plan.sp_size"
HANDING_ON = ("llamafactory.train.sft.trainer",)
"""Modules whose trainer computes another loss only with a ``compute_loss_func``, which is refused by itself."""


def sequence_clashes(
    config: EngineConfig, args: Any, compute_loss_func: Any = None, trainer: type | None = None
) -> list[Problem]:
    """Return what Trainer was asked for, or its subclass does, that can't go with ranks that share sequences."""
    if config.parallel_plan.sp_size == 1:
        return []
    place = config.origin(KEY).place
    problems = []
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        message = "batch_rebalance gives every rank rows of its own, and those of a group must share theirs"
        problems.append(Problem(place, KEY, message, "choose another train_sampling_strategy, or sp_size 1"))
    if args.label_smoothing_factor:
        message = "label smoothing is computed from logits of whole sequences, and a rank has those of a part"
        problems.append(Problem(place, KEY, message, "set label_smoothing_factor to 0, or use sp_size 1"))
    if compute_loss_func is not None:
        message = "compute_loss_func is given logits of whole sequences, and a rank has those of a part"
        problems.append(Problem(place, KEY, message, "leave the loss to the model, or use sp_size 1"))
    if getattr(args, "neftune_noise_alpha", None):
        message = "NEFTune scales its noise by the length of whole sequences, and a rank has a part"
        problems.append(Problem(place, KEY, message, "remove neftune_noise_alpha, or use sp_size 1"))
    for kind in own_losses(trainer):
        message = f"{kind.__name__}.compute_loss would see logits of a part, and a loss that is this part's share"
        problems.append(Problem(place, KEY, message, "add to the loss by a plugin's loss_term, or use sp_size 1"))
    return problems


def own_losses(trainer: type | None) -> list[type]:
    """Return the classes of a trainer that do more about the loss than to hand it on from Trainer's method."""
    return [
        kind
        for kind in (trainer.__mro__ if trainer is not None else ())
        if "compute_loss" in vars(kind)
        and kind.__module__.partition(".")[0] not in ("torchturbo", "transformers")
        and kind.__module__ not in HANDING_ON
        and not _hands_on(vars(kind)["compute_loss"])
    ]


def _hands_on(method: Callable[..., Any]) -> bool:
    """Return whether all that a method does is to return what the next class's method of its name does."""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, TypeError, ValueError, SyntaxError):  # made without a file
        return False
    body = getattr(found, "body", None)
    if not isinstance(body, list) or not isinstance(body[-1], ast.Return) or not isinstance(body[-1].value, ast.Call):
        return False
    call = body[-1].value
    given = [
        *(at.value if isinstance(at, ast.Starred) else at for at in call.args),
        *(at.value for at in call.keywords),
    ]
    return (
        all(isinstance(at, ast.Expr) and isinstance(at.value, ast.Constant) for at in body[:-1])  # its docstring
        and ast.unparse(call.func) == "super().compute_loss"
        and all(isinstance(at, ast.Name) for at in given)
    )


class DataMixin:
    """What :class:`torchturbo.adapters.hf_trainer.TurboMixin` does about data where several ranks run."""

    turbo: Engine

    if TYPE_CHECKING:  # Trainer's own attributes, which its constructor sets
        args: Any
        state: Any
        accelerator: Any
        _train_batch_size: int
        _plain_loss: bool

    _prepares_training: bool = False

    def create_accelerator_and_postprocess(self) -> None:
        """Let Trainer make its accelerator, and see to it that it deals out rows to data-parallel ranks."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.turbo.context.world_size == 1:
            return
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        if self.turbo.context.plan.sp_size > 1:
            self.accelerator.gather_for_metrics = self._gather_rows
            self.gather_function = partial(self._gather_rows, use_gather_object=self.args.eval_use_gather_object)

    def get_train_dataloader(self) -> Any:
        """Return the loader of this rank's training rows: the same ones on every rank of a group."""
        self._prepares_training = True
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            self._prepares_training = False

    def _prepare_data_loader(self, loader: Any, device_placement: bool | None = None, slice_fn: Any = None) -> Any:
        """Do what accelerate's method of this name does, for data-parallel ranks in place of all ranks."""
        accelerator, plan, rank = self.accelerator, self.turbo.context.plan, self.turbo.context.rank
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        ranks, index = plan.dp_size, plan.dp_rank(rank)
        if "rank" in getattr(loader.worker_init_fn, "keywords", {}):  # workers that draw random numbers, too
            loader.worker_init_fn = partial(loader.worker_init_fn, rank=index)
        dispatched = accelerator.dispatch_batches
        if plan.sp_size > 1 and self._prepares_training:
            dispatched = False  # a loader that skips the rows before a resume is made anew, for all ranks
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=ranks,
            process_index=index,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            # Orders that are drawn from torch's own generator are drawn alike on all ranks, however they were seeded.
            rng_types=[*accelerator.rng_types, "torch"],
            dispatch_batches=dispatched,
            even_batches=accelerator.even_batches,
            slice_fn_for_dispatch=slice_fn,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=self.args.data_seed,  # which taken_over() has set
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        if isinstance(prepared, DataLoaderDispatcher):  # it asks the launch which rank it is
            state: Any = View(prepared.state, {"num_processes": ranks, "process_index": index})  # pyright: ignore
            prepared.state = state
        accelerator._dataloaders.append(prepared)
        return prepared

    # ---- what is gathered and counted ----

    def _gather_rows(self, data: Any, use_gather_object: bool = False) -> Any:
        """Do what accelerate's ``gather_for_metrics`` does, with the rows of one rank of each group. A collective."""
        meshes = self.turbo.context.meshes
        assert meshes is not None  # there is sequence parallelism
        group, ranks = meshes.dp.get_group(), meshes.plan.dp_size
        state = self.accelerator.gradient_state
        kept = slice(state.remainder if state.end_of_dataloader and state.remainder > 0 else None)

        def gather(tensor: Tensor) -> Tensor:
            mine = (tensor.clone()[None] if tensor.dim() == 0 else tensor).contiguous()
            every = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(every, mine, group=group)
            return torch.cat(every)[kept]

        if use_gather_object or not _tensors_alone(data):
            objects: list[Any] = [None] * ranks
            dist.all_gather_object(objects, data, group=group)
            return [item for items in objects for item in items][kept]
        return recursively_apply(gather, data, error_on_other_type=True)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        """Predict one batch; whole logits are put together only if somebody looks at them."""
        sequence = self.turbo.context.sequence
        if sequence is not None:
            sequence.joins_outputs = not (prediction_loss_only and self._plain_loss)
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]
        finally:
            if sequence is not None:
                sequence.joins_outputs = True

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of one optimizer step."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.turbo.context.plan.dp_size)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return a rank's share of the operations of its batch; Trainer adds up those of all ranks."""
        return super().floating_point_ops(inputs) // self.turbo.context.plan.sp_size  # type: ignore[misc, no-any-return]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count a batch's tokens once a group; Trainer adds up those of all ranks."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.turbo.context.plan.sp_size


def _tensors_alone(data: Any) -> bool:
    """Return whether nested lists and mappings hold tensors only."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
