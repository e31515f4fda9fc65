"""The formulas of the router losses against a version that goes token by token, and what they must not depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import router_oracle as oracle
import torch
from torch import Tensor

from torchturbo.objectives.router_losses import Losses, router_losses, valid_tokens
from torchturbo.objectives.routers import SCORES

T, E, K = 14, 6, 2
EVERY = torch.ones(T, dtype=torch.bool)


def logits(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(T, E, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def of(*layers: Tensor, score: str = "softmax", valid: Tensor = EVERY, k: int = K) -> Losses:
    return router_losses([(layer, SCORES[score], k) for layer in layers], valid)


def transformers_loss(layers: Any, *given: Any) -> Any:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func(layers, *given)


def some_padding() -> Tensor:
    return torch.arange(T) % 4 != 3


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("valid", [EVERY, some_padding()], ids=["whole", "padded"])
def test_value_and_gradient(score: str, valid: Tensor) -> None:
    """Two layers, in float64."""
    fast, slow = [logits(0), logits(1)], [logits(0), logits(1)]
    found = of(*fast, score=score, valid=valid)
    expected = Losses(
        sum((oracle.aux(layer, valid, K, score) for layer in slow), torch.zeros(())),
        sum((oracle.z(layer, valid) for layer in slow), torch.zeros(())),
    )

    assert torch.allclose(torch.stack(expected), torch.stack(found), rtol=1e-9)
    for value, reference in zip(found, expected, strict=True):
        mine, theirs = (
            torch.autograd.grad(loss, layers, retain_graph=True) for loss, layers in ((value, fast), (reference, slow))
        )
        assert all(torch.allclose(one, other, 1e-6, 1e-12) for one, other in zip(theirs, mine, strict=True))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradient_by_finite_differences(score: str) -> None:
    """The shares of the choices stay as they are while a logit moves: they have no gradient."""
    given, valid = logits(), some_padding()
    load = oracle.load_of(given, valid, K, score)
    (found,) = torch.autograd.grad(of(given, score=score, valid=valid).aux, given)
    step = 1e-6
    for at in ((0, 0), (1, 4), (9, 5), (3, 2)):  # the last one is padding
        moved = []
        for sign in (1, -1):
            other = given.detach().clone()
            other[at] += sign * step
            moved.append(float(oracle.aux(other, valid, K, score, load)))
        assert (moved[0] - moved[1]) / (2 * step) == pytest.approx(float(found[at]), rel=1e-6, abs=1e-9)


def test_a_uniform_router_has_1() -> None:
    """Whatever the number of experts, and how many of them a token meets."""
    for k in (1, 2, 6):
        assert float(of(torch.zeros(T, E), k=k).aux) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_all_tokens_at_the_same_experts(score: str) -> None:
    """E / k where the scores agree."""
    given = torch.full((T, E), -60.0)
    given[:, 1] = given[:, 4] = 60

    assert float(of(given, score=score).aux) == pytest.approx(E / K, rel=1e-6)


def test_layers_that_lean_to_opposite_sides() -> None:
    """Each is uneven by itself. Transformers' loss pools the layers, and finds them even: 1, times k."""
    one, other = torch.zeros(T, 4), torch.zeros(T, 4)
    one[:, :2], other[:, 2:] = 4, 4
    assert float(transformers_loss((one, other), 4, 2)) == pytest.approx(2, rel=1e-6)
    assert float(of(one, other).aux) / 2 == pytest.approx(float(of(one).aux), rel=1e-6)
    assert float(of(one).aux) > 1.9


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_transformers_own_loss_of_one_layer(padded: bool) -> None:
    """Value and gradient; it has no 1 / k."""
    given, theirs = logits(), logits()
    mask = some_padding().long().view(2, 7) if padded else None
    expected = transformers_loss((theirs,), E, K, mask)
    found = of(given, valid=some_padding() if padded else EVERY).aux

    assert float(found.detach()) == pytest.approx(float(expected.detach()) / K, rel=1e-6)
    (mine,), (reference,) = torch.autograd.grad(found, given), torch.autograd.grad(expected, theirs)
    assert torch.allclose(reference / K, mine, 1e-6, 1e-9)


def test_z_loss_of_logits() -> None:
    """Zeros give (ln E)^2. A shift of all logits changes it, and leaves the balance alone."""
    assert float(of(torch.zeros(T, E)).z) == pytest.approx(math.log(E) ** 2, rel=1e-6)
    given = logits()
    assert float(of(given + 3).z) > float(of(given).z) + 1
    assert float(of(given + 3).aux) == pytest.approx(float(of(given).aux), rel=1e-9)


def test_padding_does_not_matter() -> None:
    """Not its number, and not what is in it."""
    given, valid = logits(), some_padding()
    alone = of(given[valid], valid=EVERY[: int(valid.sum())])
    filled = given.detach().clone()
    filled[~valid] = torch.nan
    filled.requires_grad_()
    found = of(filled, valid=valid)

    assert torch.allclose(torch.stack(alone), torch.stack(found), rtol=1e-9)
    (gradient,) = torch.autograd.grad(found.aux + found.z, filled)
    assert int(gradient.count_nonzero(dim=1).gt(0).sum()) == int(valid.sum())
    assert bool(torch.isfinite(gradient).all())


def test_nothing_but_padding() -> None:
    """0, with a gradient of 0."""
    given = logits()
    found = of(given, valid=~EVERY)

    assert [float(loss) for loss in found] == [0, 0]
    (gradient,) = torch.autograd.grad(found.aux + found.z, given)
    assert not gradient.any()


def test_half_precision_is_widened() -> None:
    """Logits in bfloat16 are scored and summed in float32."""
    given = logits(dtype=torch.bfloat16)
    found = of(given)

    assert found.aux.dtype == torch.float32
    assert float(found.aux) == pytest.approx(float(of(given.detach().double()).aux), rel=1e-6)


def test_scores_are_not_kept_for_backward() -> None:
    """A layer's scores in float32 would outweigh its logits: they are computed again, layer by layer."""
    seen: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: seen.append(value.shape) or value, lambda value: value):
        found = of(logits(), logits(1))

    assert 2 == seen.count((T, E))  # the logits themselves
    (found.aux + found.z).backward()


# ---- which tokens are padding ----


def block(**changes: Any) -> dict[str, Any]:
    return {"input_ids": torch.zeros(2, 5, dtype=torch.long), **changes}


PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def pairs() -> Tensor:
    return torch.ones(5, 5).tril().bool() & PADDED[:, None, None, :].bool()


@pytest.mark.parametrize(
    "mask",
    [
        PADDED,
        PADDED * torch.tensor([[1, 1, 2, 2, 3]]),
        pairs(),
        torch.zeros(2, 1, 5, 5).masked_fill(~pairs(), torch.finfo(torch.float32).min),
        torch.zeros(2, 1, 5, 5).masked_fill(~pairs(), -torch.inf),
        {"full_attention": pairs(), "sliding_attention": pairs()},
    ],
    ids=[
        "2-D",
        "numbered documents",
        "booleans of pairs",
        "added to scores",
        "minus infinity",
        "of each kind of layer",
    ],
)
def test_padding_in_masks(mask: Any) -> None:
    """In all the forms that a model takes."""
    assert PADDED.bool().tolist() == valid_tokens(block(attention_mask=mask)).tolist()


def test_padding_in_a_mask_of_flex_attention() -> None:
    """It is a function of pairs, which is asked of tokens and themselves alone."""
    from torch.nn.attention.flex_attention import create_block_mask

    real = PADDED.bool()
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & real[b, k], 2, None, 5, 5, device="cpu")

    assert real.tolist() == valid_tokens(block(attention_mask=mask)).tolist()


def test_without_a_mask_every_token_counts_but_what_fills_up_packed_rows() -> None:
    """One more document of one token, without a label; embeddings stand for tokens as well."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]])
    labels = ids.masked_fill(ids == 0, -100)

    assert valid_tokens(block()).all()
    assert (
        PADDED.bool().tolist() == valid_tokens({"input_ids": ids, "labels": labels, "position_ids": positions}).tolist()
    )
    assert (2, 5) == valid_tokens({"inputs_embeds": torch.zeros(2, 5, 8)}).shape


def test_a_mask_of_another_length_is_refused() -> None:
    """With both sizes."""
    with pytest.raises(ValueError, match=r"expected an attention_mask of 2 x 5 tokens, got \[2, 4\]"):
        valid_tokens(block(attention_mask=PADDED[:, 1:]))
    with pytest.raises(ValueError, match=r"of flex attention, got Tensor\[2, 5, 5\]"):
        valid_tokens(block(attention_mask=pairs()[:, 0]))
