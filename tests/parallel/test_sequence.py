"""What sequence parallelism does beside arithmetic: random numbers, generation, copies, undoing, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import parity
import pytest
import sequences
import tiny
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks
from torch import nn

from torchturbo.parallel.all_to_all import exchange
from torchturbo.parallel.attention_masks import FullMasks
from torchturbo.parallel.sequence import SequenceParallel, remove
from torchturbo.parallel.ulysses import NAME

# ---- the exchange ----


def exchanged(rank: int) -> None:
    whole = torch.randn(2, 4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    part = whole[:, :, rank * 3 : rank * 3 + 3].clone().requires_grad_()
    half = part.detach().float()[:, :2].contiguous()  # another number of heads, in another format

    heads, halves = exchange((part, half), dist.group.WORLD, scatter=1, gather=2)
    (back,) = exchange((heads,), dist.group.WORLD, scatter=2, gather=1)

    assert torch.equal(heads, whole[:, rank * 2 : rank * 2 + 2])
    assert torch.equal(halves, whole.float()[:, rank : rank + 1])
    assert torch.equal(back, part)
    weights = torch.randn(2, 2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1 + rank))
    (heads * weights).sum().backward()
    others = [
        torch.randn(2, 2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1 + r)) for r in (0, 1)
    ]
    assert torch.equal(part.grad, torch.cat(others, 1)[:, :, rank * 3 : rank * 3 + 3])


def test_the_exchange_and_its_gradients_are_each_others_way_back() -> None:
    """Also of tensors that are laid out in another order, and of several number formats at once."""
    run_ranks(2, exchanged)


# ---- random numbers ----


class Seen(nn.Module):
    """Remembers what dropout let through."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(nn.functional.dropout(torch.ones(64), 0.5, training=True))
        return x


def dropped(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    model = sequences.model(attention_dropout=0.1)
    model.model.norm = Seen()
    sequences.shared(model)
    for _ in range(2):
        model(**sequences.batch()).loss.backward()
    return model.model.norm.kept, torch.rand(3)


def test_dropout_differs_between_ranks_and_steps_and_leaves_the_generators_alike() -> None:
    """What ranks draw outside of the model, an order of rows for instance, they draw alike."""
    (kept, after), (others, after_others) = run_ranks(2, dropped)

    assert torch.equal(after, after_others)
    assert not any(torch.equal(mine, theirs) for mine, theirs in zip(kept, others, strict=True))
    assert not torch.equal(kept[0], kept[1])


def recomputed(rank: int) -> None:
    torch.manual_seed(3)
    plain, given = sequences.model(attention_dropout=0.5, attn_implementation="eager"), sequences.batch()
    checkpointed = copy.deepcopy(plain)
    tiny.checkpoint(checkpointed, reentrant=False)
    steps = []
    for model in (plain, checkpointed):
        sequences.shared(model)
        torch.manual_seed(4)
        steps.append(sequences.run(model, given))
    parity.assert_equal(steps[1], steps[0])


def test_recomputed_layers_drop_what_they_dropped() -> None:
    run_ranks(2, recomputed)


# ---- generation ----


def generated(rank: int) -> None:
    model = sequences.model().eval()
    prompt = sequences.ids(length=5)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    expected = model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    given = sequences.batch()
    before = model(**given).loss

    sequences.shared(model)
    found = model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)

    assert torch.equal(expected, found)
    with torch.no_grad():
        torch.testing.assert_close(before, model(**given).loss)
    assert NAME == model.config._attn_implementation


def test_generation_runs_whole_on_every_rank() -> None:
    run_ranks(2, generated)


# ---- models beside each other, copies, undoing ----


def beside(rank: int) -> None:
    model, other, given = (
        sequences.model(),
        sequences.model("qwen3", attn_implementation="eager"),
        sequences.padded(left=True),
    )
    plain = sequences.run(copy.deepcopy(model), given)
    expected = sequences.run(copy.deepcopy(other), given)
    hooks = len(model._forward_hooks), len(model.model._forward_hooks), len(model._forward_pre_hooks)
    sequences.shared(model)

    parity.assert_equal(sequences.run(other, given), expected)  # a model in the same process that is not shared
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        parity.assert_equal(sequences.run(copied, given), plain)  # on this rank alone
        remove(copied, copied)
        assert hooks == (len(copied._forward_hooks), len(copied.model._forward_hooks), len(copied._forward_pre_hooks))
    parity.assert_equal(sequences.summed(sequences.run(model, given)), plain)

    remove(model, model)
    assert ("sdpa", "eager") == (model.config._attn_implementation, other.config._attn_implementation)
    assert hooks == (len(model._forward_hooks), len(model.model._forward_hooks), len(model._forward_pre_hooks))
    parity.assert_equal(sequences.run(model, given), plain)


def test_only_the_model_it_was_put_into_is_shared() -> None:
    """Another model, a copy and a pickle compute as ever, and so does the model itself afterwards."""
    run_ranks(2, beside)


# ---- what is refused ----


def refused(rank: int, name: str) -> None:
    model = sequences.model("qwen3_moe" if name == "output_router_logits" else "llama")
    sequences.shared(model)
    given = sequences.batch()
    if name == "inner":
        model.model(input_ids=given["input_ids"])
        copy.copy(model.model.layers[0].self_attn)(torch.zeros(1, 4, 32), (torch.zeros(1, 4, 8),) * 2, None)
    elif name == "weights":
        model(**given, weights=torch.ones(given["labels"].shape))
    elif name == "position_ids":
        model(**given, position_ids=torch.arange(13).expand(3, 2, 13))
    elif name == "attention_mask":
        model(**given, attention_mask=torch.ones(2, 13, 13))
    elif name == "other rows":
        model(input_ids=sequences.ids(seed=rank))
    elif name == "logits_to_keep":
        model(**given, logits_to_keep=2)
    else:
        model(**given, **{name: True})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("inner", "was called past the model that was prepared for sequence parallelism"),
        ("weights", "weights [2, 13] has an entry a token"),
        ("position_ids", "expected position_ids [B, S], got [3, 2, 13]"),
        ("attention_mask", "expected an attention_mask [B, S] or [B, H, S, S]"),
        ("other rows", "the ranks of a sequence-parallel group got different micro-batches"),
        ("logits_to_keep", "the last tokens are on one rank only"),
        ("output_router_logits", "the router's loss is no sum over tokens"),
        ("output_attentions", "no rank has the weights of all heads"),
    ],
)
def test_what_would_be_wrong_is_an_error_on_every_rank(name: str, expected: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, refused, name)

    assert [0, 1] == sorted(caught.value.failures)
    assert all(expected in text for text in caught.value.failures.values())


def own_mask(rank: int) -> None:
    model = tiny.model()
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **(kwargs | {"attention_mask": torch.ones(1, 1, 7, 7)}))
    SequenceParallel(dist.group.WORLD).install(model, model)
    model(**sequences.batch())


def test_an_attention_with_a_mask_of_its_own_is_an_error() -> None:
    with pytest.raises(RankFailed, match="made a mask or a bias of its own"):
        run_ranks(2, own_mask)


# ---- masks ----


@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
def test_padding_of_a_ready_mask_sees_itself_and_nobody_sees_it(added: bool) -> None:
    """A row that sees nothing is NaN in some kernels, and NaN times a weight of zero is NaN again."""
    given = sequences.ready(4, added=added)["attention_mask"]
    masks = FullMasks(tiny.model().config, given, torch.arange(16)[None], sequences.LENGTH, 16)

    mask = masks.mask("sdpa", None, torch.zeros(2, 4, 16, 8))

    sees = mask == 0 if added else mask
    assert torch.equal(sees[..., :13, :13], given == 0 if added else given)
    assert not sees[..., :13, 13:].any()
    assert torch.equal(sees[..., 13:, :], torch.eye(16, dtype=torch.bool)[13:].expand(2, 4, 3, 16))


def test_masks_are_made_once_for_each_window() -> None:
    """Layers and recomputed layers get the one that was made."""
    masks = FullMasks(tiny.model("mistral").config, None, torch.arange(16)[None], 16, 16)
    query = torch.zeros(2, 4, 16, 8)

    assert masks.mask("sdpa", None, query) is None  # causal attention needs none
    assert masks.mask("sdpa", 4, query) is masks.mask("sdpa", 4, query)
    assert masks.mask("sdpa", 4, query) is not masks.mask("sdpa", 5, query)
