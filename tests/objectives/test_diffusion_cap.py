"""CAP: the entropy of right predictions, its gradient, and its place beside the cross-entropy, in chunks and whole."""

from __future__ import annotations

import math
from typing import Any

import diffusing
import pytest
import torch
from diffusing import noise, ragged, rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchturbo.objectives import chunked
from torchturbo.objectives.diffusion.cap import Cap, confident_entropy
from torchturbo.objectives.diffusion.noise import DOUBLED
from torchturbo.objectives.diffusion.objective import BlockDiffusion
from torchturbo.objectives.normalise import Normaliser

VOCABULARY = 320


def logits(count: int = 6, size: int = 5, seed: int = 3) -> Tensor:
    made = torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.requires_grad_()


def by_hand(values: Tensor, target: Tensor) -> tuple[float, Tensor]:
    """Return CAP's mean and its gradient by the logits [N, V], number by number: dH/dl_v = -p_v (log p_v + H)."""
    gradient, entropies = torch.zeros_like(values), []
    right = [at for at in range(len(target)) if max(values[at].tolist()) == float(values[at, target[at]])]
    for at in right:
        weights = [math.exp(value) for value in values[at].tolist()]
        probabilities = [weight / sum(weights) for weight in weights]
        entropy = -sum(one * math.log(one) for one in probabilities)
        entropies.append(entropy)
        for token, one in enumerate(probabilities):
            gradient[at, token] = -one * (math.log(one) + entropy) / len(right)
    return sum(entropies) / max(1, len(right)), gradient


def mean_of(values: Tensor, target: Tensor) -> Tensor:
    total, count = confident_entropy(values, target)
    return total / count.clamp(min=1)


def test_value_and_gradient_are_the_formulas() -> None:
    """Three right predictions of six."""
    values = logits()
    target = values.argmax(1)
    target[3:] = (target[3:] + 1) % 5
    expected, slope = by_hand(values.detach(), target)

    found = mean_of(values, target)
    found.backward()

    assert abs(float(found.detach()) - expected) < 1e-9
    assert values.grad is not None
    torch.testing.assert_close(values.grad, slope, rtol=1e-9, atol=1e-12)
    assert bool(values.grad[3:].eq(0).all())


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Which right predictions there are does not change under small steps."""
    values = logits()
    target = values.detach().argmax(1)
    assert torch.autograd.gradcheck(lambda given: mean_of(given, target), (values,))


def test_an_even_wrong_prediction_has_no_gradient() -> None:
    """Its entropy is the highest there is, and none of CAP's affairs."""
    values = torch.zeros(2, 4, dtype=torch.float64)
    values[0, 1] = 1.0
    values.requires_grad_()
    mean_of(values, torch.tensor([1, 3])).backward()
    assert values.grad is not None
    assert bool(values.grad[0].ne(0).any())
    assert bool(values.grad[1].eq(0).all())


@pytest.mark.parametrize("count", [0, 3])
def test_no_right_prediction_gives_zero_with_a_graph(count: int) -> None:
    """So that backward passes, and reaches every parameter on every rank."""
    values = logits(count)
    target = (values.detach().argmax(1) + 1) % 5
    found = mean_of(values, target)
    found.backward()
    assert 0.0 == float(found.detach())
    assert values.grad is not None
    assert bool(values.grad.eq(0).all())


def test_a_token_that_cannot_come_is_no_nan() -> None:
    """Padded vocabularies have logits of -inf."""
    values = torch.tensor([[2.0, 1.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    found = mean_of(values, torch.tensor([0]))
    found.backward()
    expected, _ = by_hand(torch.tensor([[2.0, 1.0]], dtype=torch.float64), torch.tensor([0]))
    assert abs(float(found.detach()) - expected) < 1e-9
    assert values.grad is not None
    assert bool(values.grad.isfinite().all())


# ---- in a model ----


def trained(
    coefficient: float, size: int | None, window: list[dict[str, Any]], **changes: Any
) -> tuple[Any, float, Any]:
    """Run a window through a model in float64; return the model with its gradients, the loss, and CAP as logged."""
    model = diffusing.model(**changes).double().train()
    if size is not None:
        chunked.install(model, size)
    normaliser = Normaliser()
    normaliser.install(model, model)
    diffusion = BlockDiffusion(model, model, torch.float64)
    if coefficient:
        diffusion.add_cap(normaliser, coefficient)
    normaliser.open_window(window, torch.device("cpu"))
    total = 0.0
    with normaliser.applied():
        for batch in window:
            loss = model(**batch).loss
            loss.backward()
            total += float(loss.detach())
    return model, total, normaliser.term_metrics(1, torch.device("cpu")).get("cap_loss")


def right_rows(share: float = 0.5) -> list[dict[str, Any]]:
    """Return two micro-batches for a model that predicts tokens of its own: some of their labels are what it says."""
    window = [noise()(ragged([12, 9, 5]), 0), noise()(rows(2, 8, seed=9), 0)]
    model = diffusing.model().eval()
    BlockDiffusion(model, model, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for batch in window:
        with torch.no_grad():
            said = model(**batch).logits.argmax(-1)
        hidden = batch["labels"].ne(-100) & (torch.rand(said.shape, generator=generator) < share)
        for name in ("shift_labels", "labels"):
            hit = batch["labels"].eq(said) & ~hidden
            batch[name] = torch.where(hidden, said, torch.where(hit, (said + 1) % VOCABULARY, batch[name]))
    return window


def oracle(coefficient: float, window: list[dict[str, Any]]) -> tuple[Any, float, float]:
    """Return the same by the formula: cross-entropy over all hidden tokens, CAP as the mean of the micro-batches'."""
    model = diffusing.model().double().train()
    BlockDiffusion(model, model, torch.float64)
    count = sum(int(batch["labels"].ne(-100).sum()) for batch in window)
    total, caps = torch.zeros((), dtype=torch.float64), []
    for batch in window:
        given = {name: value for name, value in batch.items() if "labels" not in name}
        values = model(**given).logits[:, : batch[DOUBLED].length]
        hidden = batch["labels"].ne(-100)
        logs, target = values[hidden].log_softmax(-1), batch["labels"][hidden]
        total = total - logs.gather(1, target[:, None]).sum() / count
        right = logs[logs.argmax(-1) == target]
        assert len(right)
        caps.append(-(right.exp() * right).sum(-1).mean())
    cap = torch.stack(caps).mean()
    (total + coefficient * cap).backward()
    return model, float((total + coefficient * cap).detach()), float(cap.detach())


def assert_alike(found: Any, expected: Any) -> None:
    for name, parameter in expected.named_parameters():
        error = (found.get_parameter(name).grad - parameter.grad).norm() / parameter.grad.norm()
        assert float(error) < 1e-6, name


@pytest.mark.parametrize("size", [None, 1, 7, 1000])
def test_it_stands_beside_the_loss_whole_and_in_chunks(size: int | None) -> None:
    """Weighed, as a mean over micro-batches; logged as it is."""
    window = right_rows()
    expected, total, cap = oracle(2.0, window)
    model, found, logged = trained(2.0, size, window)

    assert abs(found - total) < 1e-6 * total
    assert abs(float(logged) - cap) < 1e-6 * cap
    assert_alike(model, expected)


@pytest.mark.parametrize("size", [None, 7])
def test_without_a_right_prediction_it_adds_nothing(size: int | None) -> None:
    """Value and gradient are those of the loss alone."""
    window = right_rows(0.0)
    model, found, logged = trained(2.0, size, window)
    plain, alone, _ = trained(0.0, size, window)
    assert (alone, 0.0) == (found, logged)
    assert_alike(model, plain)


def test_chunks_know_what_the_model_does_to_its_logits() -> None:
    """Granite scales them: whole and in chunks are one."""
    window = right_rows()
    changes: dict[str, Any] = {"kind": "granite", "logits_scaling": 0.1}
    whole, expected, cap = trained(1.0, None, window, **changes)
    model, found, logged = trained(1.0, 5, window, **changes)
    assert abs(found - expected) < 1e-6 * expected
    assert abs(float(logged) - float(cap)) < 1e-6
    assert_alike(model, whole)


class Rows(TorchDispatchMode):
    """Notes the most rows of logits that one tensor holds."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and result.shape[-1] == VOCABULARY:
            memory = result.untyped_storage().nbytes()  # none where they are expanded from one number
            self.most = max(self.most, memory // (VOCABULARY * result.element_size()))
        return result


def test_a_loss_that_overwrites_its_logits_takes_nothing_from_cap() -> None:
    """As fused kernels do, which keep their gradient in the logits' memory: what CAP takes, it takes before."""
    window = right_rows()
    model, _, expected = trained(1.0, None, window)
    del model

    def overwriting(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits.detach().zero_()
        return logits.sum() * 0

    other = diffusing.model().double().train()
    other.loss_function = overwriting
    normaliser = Normaliser()
    normaliser.install(other, other)
    BlockDiffusion(other, other, torch.float64).add_cap(normaliser, 1.0)
    normaliser.open_window(window, torch.device("cpu"))
    with normaliser.applied():
        for batch in window:
            other(**batch)
    found = normaliser.term_metrics(1, torch.device("cpu"))["cap_loss"]
    assert abs(found - float(expected)) < 1e-6


def test_no_more_than_a_chunk_of_logits_exists_at_once() -> None:
    """Forward and backward, with CAP: the head's own weight [H, V] has fewer rows."""
    window = [noise(1.0, 1.0)(rows(8, 60, prompt=0), 0)]
    with Rows() as seen:
        trained(1.0, 40, window)
    assert 40 == seen.most


def test_a_copy_of_the_model_has_its_plain_loss() -> None:
    """Nothing of CAP is in what is saved or copied."""
    import copy

    model = diffusing.model()
    normaliser = Normaliser()
    normaliser.install(model, model)
    diffusion = BlockDiffusion(model, model, torch.float32)
    plain = model.loss_function.wrapped
    diffusion.add_cap(normaliser, 1.0)

    assert plain is copy.deepcopy(model).loss_function
    diffusion.remove()
    assert plain is model.loss_function.wrapped


def with_cap() -> tuple[Any, BlockDiffusion, Cap]:
    """Return a model with CAP, whose looks are kept."""
    model = diffusing.model()
    normaliser = Normaliser()
    normaliser.install(model, model)
    diffusion = BlockDiffusion(model, model, torch.float32)
    diffusion.add_cap(normaliser, 1.0)
    cap = diffusion._cap
    assert cap is not None
    return model, diffusion, cap


@pytest.mark.parametrize(("training", "graph"), [(True, True), (False, True), (True, False)])
def test_nothing_is_looked_at_outside_of_training(training: bool, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation has no terms, and neither has what runs without a graph."""
    looks: list[int] = []
    monkeypatch.setattr(Cap, "look", lambda self, logits, target: looks.append(1))
    model, _, cap = with_cap()
    assert cap.value(None, {}) is None
    with torch.set_grad_enabled(graph):
        model.train(training)(**noise()(rows(), 0))
    assert (training and graph) == bool(looks)


def test_nothing_of_a_forward_is_kept_after_it() -> None:
    """No graph where nobody asked for the term, and neither after a forward that failed."""
    model, diffusion, cap = with_cap()
    batch = noise()(rows(), 0)
    model.train()(**batch)
    assert (None, None) == (diffusion.real, cap.found)

    plain = model.loss_function.wrapped.plain

    def failing(*args: Any, **kwargs: Any) -> Tensor:
        raise ArithmeticError

    model.loss_function.wrapped.plain = failing
    with pytest.raises(ArithmeticError):
        model(**batch)
    assert (None, None) == (diffusion.real, cap.found)
    model.loss_function.wrapped.plain = plain


def test_a_forward_begins_with_nothing_of_the_one_before() -> None:
    """Though hooks after it may not have run, as in a compiled graph: what is padding is asked of this batch."""
    model, diffusion, cap = with_cap()
    diffusion.real, cap.found = torch.ones(2, 8), (torch.ones(()), torch.ones(()))
    seen: list[Any] = []
    model.model.register_forward_pre_hook(lambda *args: seen.append((diffusion.real, cap.found)))
    model(input_ids=rows()["input_ids"])
    assert [(None, None)] == seen
