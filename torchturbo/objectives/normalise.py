"""The one normaliser: every loss term is scaled here, by its own weight over all ranks and the accumulation window.

``loss_rank = R * numerator_rank / denominator_global``: the numerator is a sum over this rank's own tokens, the
denominator the number of valid tokens of the whole window on all ranks, and R the number of ranks whose gradients
are averaged afterwards: all of them where gradients are averaged, 1 where they are summed, as FSDP2 does here. (Trainer
takes losses as means over the ranks; under it R is their number, and its adapter divides where it differentiates.) The
sum over micro-batches and ranks is then the gradient of the mean over all tokens, however unevenly they are spread. A
mean per micro-batch is not: https://github.com/huggingface/transformers/pull/34191.

Under sequence parallelism the ranks of a group hold the same micro-batch until the model slices it: its weight is
counted by each of them and so divided by their number, while its numerator is the sum over a rank's own slice.

Terms that are no sum over tokens (a router's auxiliary loss) are means over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchturbo.logging import get_logger
from torchturbo.objectives.graphs import outside_graphs
from torchturbo.ops.replace import Attribute, Handle, remove_all

log = get_logger(__name__)

IGNORE_INDEX = -100


def valid_targets(batch: Mapping[str, Any]) -> int:
    """Return how many targets of a micro-batch count in a causal language model's loss.

    ``labels`` [B, T] predict the next token, so column 0 is never a target; ``shift_labels`` [B, T] are shifted already.
    """
    if isinstance(shifted := batch.get("shift_labels"), Tensor):
        return int(shifted.ne(IGNORE_INDEX).sum())
    if isinstance(labels := batch.get("labels"), Tensor):
        return int(labels[..., 1:].ne(IGNORE_INDEX).sum())
    return 0


def scale(numerator: Tensor, denominator: Tensor, ranks: int) -> Tensor:
    """Return ``R * numerator / denominator``; a window without any weight has loss 0, not NaN."""
    weighted = denominator > 0
    return numerator * (ranks * weighted / torch.where(weighted, denominator, 1.0))


def own_loss_function(base: nn.Module) -> Any:
    """Return a model's loss function, also where an earlier trainer put its normaliser before it."""
    function = getattr(base, "loss_function", None)
    return getattr(function, "wrapped", function)


@dataclass(frozen=True)
class Term:
    """A loss term beside the model's own: what it adds to a micro-batch's loss, and what that is divided by."""

    name: str
    """Metric under which its value is logged."""
    value: Callable[[Any, Mapping[str, Any]], Tensor | None]
    """``(outputs, batch)`` to a scalar that is not divided by anything; None adds nothing."""
    weight: Callable[[Mapping[str, Any]], Tensor | None] | None = None
    """``(batch)`` to the weight that the value sums over; without it the term is a mean over micro-batches and ranks."""
    coefficient: float = 1.0
    """What the loss adds it times. The metric is without; at 0 the value is computed without a graph, and logged alone."""
    pooled: bool = False
    """Of a mean: whether the value is this rank's share of one over the micro-batch that its group's ranks hold."""


class TokenMean:
    """The mean loss over the tokens of an evaluation, whatever batches and ranks they were in.

    A mean over batches, each a mean of its own, weighs the tokens of a short batch more and changes with the layout.
    """

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self.real_rows: int | None = None
        """Rows of the batch under way that are no repetition, with which the last round of ranks is filled up."""
        self.plain = True
        """Whether the model's loss was cross-entropy alone; with other terms in it the mean would be another figure."""

    def add(
        self,
        numerator: Tensor,
        cross_entropy: Callable[..., Tensor],
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Add a batch: its summed loss, and what that was computed from, logits [B, T, V] and labels [B, T]."""
        if self.real_rows is not None:
            kept = slice(self.real_rows)
            labels = labels[kept]
            if (shifted := kwargs.get("shift_labels")) is not None:
                kwargs["shift_labels"] = shifted[kept]
            numerator = cross_entropy(logits[kept], labels, *args, **kwargs)
        self.total += float(numerator)
        self.count += valid_targets({"labels": labels, "shift_labels": kwargs.get("shift_labels")})

    def reduced(self, ranks: int, group: dist.ProcessGroup | None, device: torch.device) -> float | None:
        """Return the mean over all ranks; None where it is not the model's loss. A collective."""
        sums = torch.tensor([self.total, self.count, float(not self.plain)], dtype=_widest(device), device=device)
        if ranks > 1:
            dist.all_reduce(sums, group=group)
        total, count, others = sums.tolist()
        return None if others or not count else total / count


class Normaliser:
    """Scales the losses of one model; the trainer opens a window per optimizer step.

    Parameters
    ----------
    ranks
        The ranks of the run.
    group
        Their process group; None is the default group.
    summed
        Whether gradients are summed over the ranks instead of averaged. A rank's loss is then its share of the sum,
        as long as it is going to be differentiated; one that is only looked at is always a mean over ranks.
    sp_size
        How many neighbouring ranks share one micro-batch.

    """

    def __init__(
        self, ranks: int = 1, group: dist.ProcessGroup | None = None, *, summed: bool = False, sp_size: int = 1
    ) -> None:
        self.ranks = ranks
        self.group = group
        self.summed = summed
        self.sp_size = sp_size
        self.denominator = torch.ones((), dtype=torch.float32)
        self.micro_batches = 1
        self.terms: list[Term] = []
        self._weights: dict[str, Tensor] = {}  # each weighted term's denominator in this window
        self._logged: dict[str, Tensor] = {}  # each term's scaled values since the last log
        self.ratios: list[str] = []
        """Names of the metrics beside the terms that are quotients of sums over ranks and steps: :meth:`ratio`."""
        self._sums: dict[str, Tensor] = {}  # numerator and denominator of each since the last log
        self._terms_met = False  # whether a loss has come by that they could be added to
        self.evaluation: TokenMean | None = None
        """Sums up the evaluation under way."""
        self._handles: list[Handle] = []
        self._active = False
        self._on_scaled: Callable[[], None] | None = None
        self._main: Tensor | None = None  # the scaled cross-entropy of the forward under way
        self._handed: Tensor | None = None  # what the model got back for it, and may add its own terms to
        self._handed_version = 0

    @property
    def active(self) -> bool:
        """Whether losses are normalised at the moment."""
        return self._active

    def open_window(
        self, micro_batches: Sequence[Mapping[str, Any]], device: torch.device, *, with_terms: bool = True
    ) -> Tensor:
        """Count the targets of a rank's micro-batches, sum them over all ranks, and keep that as the denominator.

        The sum is a collective: every rank calls this once per window, also one without a target or a batch.
        ``with_terms`` is false in an evaluation, which has none. Returns the global count, a float32 scalar.
        """
        count = torch.tensor(sum(map(valid_targets, micro_batches)), dtype=torch.int64, device=device)
        if self.ranks > 1:
            dist.all_reduce(count, group=self.group)
        self.denominator = (count // self.sp_size).to(torch.float32)
        self.micro_batches = max(1, len(micro_batches))
        if with_terms:
            self._open_terms(micro_batches, device)
        return self.denominator

    def _open_terms(self, micro_batches: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Sum the weights of each term over micro-batches and ranks, all in one collective."""
        weighted = [term for term in self.terms if term.weight is not None]
        if not weighted:
            return
        sums = torch.zeros(len(weighted), dtype=_widest(device), device=device)
        for at, term in enumerate(weighted):
            for batch in micro_batches:
                if (weight := term.weight(batch)) is not None:  # type: ignore[misc]  # the list holds no other
                    sums[at] += weight.detach()
        if self.ranks > 1:
            dist.all_reduce(sums, group=self.group)
        totals = (sums / self.sp_size).float()
        self._weights = {term.name: total for term, total in zip(weighted, totals, strict=True)}

    @contextmanager
    def window_kept(self) -> Iterator[None]:
        """Put the window back that an evaluation replaces: one may run between the micro-batches of a step."""
        window = self.denominator, self.micro_batches, self._weights
        try:
            yield
        finally:
            self.denominator, self.micro_batches, self._weights = window

    def token_term(self, numerator: Tensor) -> Tensor:
        """Scale a sum over this rank's tokens, a scalar."""
        return scale(numerator, self.denominator.to(numerator.device), self.factor)

    def mean_term(self, value: Tensor, *, pooled: bool = False) -> Tensor:
        """Scale a term that is a mean over micro-batches and ranks, a scalar.

        A ``pooled`` one is a share: those of the ranks that hold a micro-batch together add up to its value.
        """
        return value * (self.factor * (self.sp_size if pooled else 1) / (self.ranks * self.micro_batches))

    def ratio(self, name: str, numerator: Tensor, denominator: Tensor) -> None:
        """Add to a metric that is a quotient of sums, one of :attr:`ratios`; both are scalars of this rank."""
        pair = torch.stack([numerator.detach().float(), denominator.detach().float()])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    @property
    def factor(self) -> int:
        """R: the number of ranks over which the loss that is computed now will be averaged."""
        return 1 if self.summed and torch.is_grad_enabled() else self.ranks

    @contextmanager
    def applied(self, on_scaled: Callable[[], None] | None = None) -> Iterator[None]:
        """Normalise the model's losses inside this block; outside it the model computes what it always did.

        ``on_scaled`` is called when a loss was: a model may compute its loss past the function it says it uses.
        """
        self._active, self._on_scaled = True, on_scaled
        try:
            yield
        finally:
            self._active, self._on_scaled = False, None
            self._main = self._handed = None

    def install(self, model: nn.Module, base: nn.Module) -> None:
        """Put the normaliser between a model and its loss function.

        ``base`` is the Transformers model that calls ``self.loss_function``; ``model`` the module that is called
        (another one where PEFT wraps it, since PEFT calls ``base.forward`` past its hooks).
        """
        name = "_loss_function" if isinstance(getattr(type(base), "loss_function", None), property) else "loss_function"
        self._handles = [
            Attribute(base, name, NormalisedLoss(self, own_loss_function(base))),
            model.register_forward_hook(AfterForward(self), with_kwargs=True),
        ]

    @staticmethod
    def remove(base: nn.Module) -> None:
        """Take the normaliser out of a model that has one."""
        installed = getattr(base, "loss_function", None)
        if isinstance(installed, NormalisedLoss):
            remove_all(installed.normaliser._handles)

    def cross_entropy(self, cross_entropy: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return the scaled loss of a model that calls ``cross_entropy`` for it."""
        if not self._active:
            return cross_entropy(*args, **kwargs)
        kwargs["num_items_in_batch"] = 1  # instead of the default mean this gives the plain sum: the numerator
        numerator = cross_entropy(*args, **kwargs)
        if self.evaluation is not None:
            self.evaluation.add(numerator, cross_entropy, *args, **kwargs)
        self._main = self.token_term(numerator)
        if self._on_scaled is not None:
            self._on_scaled()
        # A copy, because models add their own terms in place (`loss += coefficient * aux_loss`).
        self._handed = self._main.clone()
        self._handed_version = self._handed._version
        return self._handed

    def after_forward(self, module: nn.Module, batch: Mapping[str, Any], output: Any) -> Any:
        """Scale what the model added to the cross-entropy, and add the other terms."""
        if not self._active or self._main is None or self._handed is None:
            return None
        main, handed = self._main, self._handed
        self._main = self._handed = None
        loss = output["loss"] if isinstance(output, Mapping) else output[0]
        added = loss is not handed or loss._version != self._handed_version
        if added and self.evaluation is not None:
            self.evaluation.plain = False
        # The model's auxiliary loss is a mean, not a sum over tokens.
        total = main + self.mean_term(loss - main) if added else main
        if module.training:
            self._terms_met = True
            for term in self.terms:
                total = self._with_term(total, term, output, batch)
        if total is main:
            return None
        if isinstance(output, Mapping):
            output["loss"] = total  # type: ignore[index]
            return output
        return (total, *output[1:])

    # A term reads what hooks have noted, and its shapes follow the data: it stays out of compiled graphs.
    @outside_graphs
    def _with_term(self, loss: Tensor, term: Term, output: Any, batch: Mapping[str, Any]) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and term.coefficient != 0):
            value = term.value(output, batch)
        if value is None:
            return loss
        if term.weight is None:
            value = self.mean_term(value, pooled=term.pooled)
        else:
            if term.name not in self._weights:
                raise RuntimeError(
                    f"{term.name}: no window is open; call open_window with the step's micro-batches first"
                )
            value = scale(value, self._weights[term.name].to(value.device), self.factor)
        shown = value.detach().float() * (self.ranks / self.factor)  # as a mean over ranks
        self._logged[term.name] = self._logged.get(term.name, 0) + shown
        if term.coefficient == 0:
            return loss
        return loss + (value if term.coefficient == 1 else value * term.coefficient)

    def forget_terms(self) -> None:
        """Begin the means of the terms anew."""
        self._logged, self._sums = {}, {}

    def term_metrics(self, steps: int, device: torch.device) -> dict[str, float]:
        """Return each term's mean over the last optimizer steps and each ratio, and begin anew.

        A collective where there are terms. A ratio of nothing is left out.
        """
        if not self.terms:
            return {}
        if not self._terms_met:
            self._terms_met = True
            names = ", ".join(term.name for term in self.terms)
            log.warning_rank0("loss terms have no effect (%s): the trainer computes its loss past the model's", names)
        values = [torch.as_tensor(self._logged.get(term.name, 0.0)).to(device) for term in self.terms]
        pairs = [self._sums.get(name, torch.zeros(2)).to(device) for name in self.ratios]
        self.forget_terms()
        sums = torch.cat([torch.stack(values), *pairs])
        if self.ranks > 1:
            dist.all_reduce(sums, group=self.group)
        means = (sums[: len(values)] / (self.ranks * max(1, steps))).tolist()
        metrics = {term.name: mean for term, mean in zip(self.terms, means, strict=True)}
        for name, (numerator, denominator) in zip(self.ratios, sums[len(values) :].view(-1, 2).tolist(), strict=True):
            if denominator:
                metrics[name] = numerator / denominator
        return metrics


class NormalisedLoss:
    """A model's loss function under a normaliser; a copy or a pickle of the model has the plain function."""

    def __init__(self, normaliser: Normaliser, plain: Callable[..., Tensor]) -> None:
        self.normaliser, self.wrapped = normaliser, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.normaliser.cross_entropy(self.wrapped, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.wrapped,)


class AfterForward:
    """The forward hook of a normaliser; in a copy or a pickle of the model it does nothing."""

    def __init__(self, normaliser: Normaliser | None = None) -> None:
        self.normaliser = normaliser

    def __call__(self, module: nn.Module, args: Any, batch: Mapping[str, Any], output: Any) -> Any:
        return None if self.normaliser is None else self.normaliser.after_forward(module, batch, output)

    def __reduce__(self) -> Any:
        return AfterForward, ()


def _itself(function: Any) -> Any:
    return function


def _widest(device: torch.device) -> torch.dtype:
    """Return a device's widest format: sums of many batches lose digits in float32, all that MPS and NPU have."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32
