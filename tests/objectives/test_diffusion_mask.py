"""The mask of block diffusion: its rule by brute force, what a model makes of it, and what it costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import diffusing
import pytest
import torch
from diffusing import BLOCK, MASK, noise, packed, ragged, rows
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from torchturbo.objectives.diffusion.mask import KINDS, attention_mask, doubled_rule, prefix_rule, sees
from torchturbo.objectives.diffusion.noise import DOUBLED
from torchturbo.objectives.diffusion.objective import BlockDiffusion
from torchturbo.parallel.attention_masks import FullMasks

FLEX = "transformers.integrations.flex_attention.compile_friendly_flex_attention"


@pytest.fixture(autouse=True)
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flex attention run uncompiled; where a gradient is wanted, which it has none of on a CPU, as its formula."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kwargs: Any) -> Any:
        return (by_formula if torch.is_grad_enabled() else flex_attention)(query, key, value, **kwargs)

    monkeypatch.setattr(FLEX, attend)


def by_formula(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float, **kwargs: Any) -> Tensor:
    """Return what flex attention computes of [B, H, S, D] and grouped keys, from the rule and the blocks of its mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    at = torch.arange(query.shape[2])
    row = torch.arange(block_mask.shape[0])[:, None, None]
    tile = torch.arange(query.shape[2]) // block_mask.BLOCK_SIZE[0]
    blocks = block_mask.to_dense()[:, 0].bool()[:, tile][:, :, tile]
    seen = block_mask.mask_mod(row, 0, at[:, None], at[None, :]) & blocks
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ value


def added(rule: Any, rows: int, length: int) -> Tensor:
    """Return which pairs of a mask for sdpa and eager are open [rows, length, length]."""
    mask = attention_mask("sdpa", rule, rows, length, torch.float64, torch.device("cpu"))
    assert (rows, 1, length, length) == mask.shape
    assert bool((mask.eq(0) | mask.eq(torch.finfo(torch.float64).min)).all())
    return mask[:, 0].eq(0)


def by_hand(length: int, block: int, numbers: list[int] | None = None) -> Tensor:
    """Return the mask of one row, pair by pair, from the three rules and the documents."""
    seen = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for query in range(2 * length):
        for key in range(2 * length):
            mine, its = (query % length) // block, (key % length) // block
            diagonal = (query < length) == (key < length) and mine == its
            offset = query < length <= key and mine > its
            causal = query >= length and key >= length and mine >= its
            same = numbers is None or numbers[query % length] == numbers[key % length] != 0
            seen[query, key] = (diagonal or offset or causal) and same or query == key
    return seen


@pytest.mark.parametrize(("length", "block"), [(12, 4), (12, 1), (12, 12), (9, 3)])
def test_the_mask_is_the_rule(length: int, block: int) -> None:
    """Pair by pair."""
    expected = by_hand(length, block)
    assert torch.equal(expected, added(doubled_rule(None, length, block), 1, 2 * length)[0])
    pairs = [[sees(query, key, length, block) for key in range(2 * length)] for query in range(2 * length)]
    assert expected.tolist() == pairs


def test_documents_and_padding_see_themselves_alone() -> None:
    """Two rows: two documents, and one with padding behind it."""
    numbers = [[1] * 4 + [2] * 8, [1] * 8 + [0] * 4]
    documents = torch.tensor([row * 2 for row in numbers])
    found = added(doubled_rule(documents, 12, 4), 2, 24)
    assert torch.equal(torch.stack([by_hand(12, 4, row) for row in numbers]), found)


def test_a_flex_mask_is_the_same_rule() -> None:
    """Its blocks are the dense mask's, and its rule too."""
    documents = torch.tensor([([1] * 100 + [2] * 100 + [0] * 56) * 2])
    block = attention_mask(
        "flex_attention", doubled_rule(documents, torch.tensor(256), 4), 1, 512, torch.float32, documents.device
    )
    dense = added(doubled_rule(documents, 256, 4), 1, 512)
    tiles = dense.reshape(1, 1, 4, 128, 4, 128).any(5).any(3)
    assert torch.equal(tiles, block.to_dense().bool())
    at = torch.arange(512)
    assert torch.equal(dense[0], block.mask_mod(0, 0, at[:, None], at[None, :]))


def test_ranks_that_share_sequences_take_a_flex_mask_as_it_is() -> None:
    """Its length divides by them; it can't be padded."""
    made = attention_mask("flex_attention", doubled_rule(None, 8, 4), 1, 16, torch.float32, torch.device("cpu"))
    positions, config = torch.arange(16)[None], diffusing.model().config
    masks = FullMasks(config, made, positions, 16, 16)
    assert made is masks.mask("flex_attention", None, torch.zeros(1, 4, 16, 8))
    with pytest.raises(ValueError, match="got BlockMask"):
        FullMasks(config, made, positions, 16, 18)


# ---- what a model makes of it ----


def installed(kind: str, **changes: Any) -> Any:
    """Return a diffusion model in float64 that takes doubled batches under one kind of attention."""
    model = diffusing.model(attn_implementation=kind, **changes).double()
    model.loss_function = exact
    BlockDiffusion(model, model, torch.float64)
    return model.train()


def exact(logits: Tensor, labels: Tensor, *args: Any, shift_labels: Tensor, **kwargs: Any) -> Tensor:
    """Do what Transformers' loss does with labels that are shifted already, which casts to float32 on its way."""
    return functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")


def summed(model: Any, doubled: dict[str, Any]) -> Tensor:
    """Return the sum of a doubled batch's losses."""
    loss: Tensor = model(**doubled).loss
    return loss


def block_by_block(model: Any, doubled: dict[str, Any]) -> Tensor:
    """Return the same without doubling: each noisy block runs behind the clean text before it, alone."""
    length, total = doubled[DOUBLED].length, torch.zeros((), dtype=torch.float64)
    for row in range(len(doubled["input_ids"])):
        ids, numbers = doubled["input_ids"][row], doubled["attention_mask"][row, :length]
        for document in range(1, int(numbers.max()) + 1):
            own = numbers.eq(document).nonzero().flatten()
            noisy, clean, labels = ids[own], ids[own + length], doubled["labels"][row, own]
            for start in range(0, len(own), BLOCK):
                text = torch.cat((clean[:start], noisy[start : start + BLOCK]))[None]
                at = torch.arange(len(text[0])) // BLOCK
                mask = torch.zeros(len(at), len(at), dtype=torch.float64)
                mask = mask.masked_fill(at[:, None] < at[None, :], torch.finfo(torch.float64).min)
                logits = model(input_ids=text, attention_mask=mask[None, None]).logits[0, -BLOCK:]
                total = total + functional.cross_entropy(logits, labels[start : start + BLOCK], reduction="sum")
    return total


BATCHES = {"equal": rows, "ragged": lambda: ragged([12, 9, 5]), "packed": lambda: packed([6, 5, 9])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", list(BATCHES))
def test_a_doubled_run_is_the_sum_of_runs_block_by_block(kind: str, batch: str) -> None:
    """In value and in every gradient, for text of equal lengths, of several, and packed."""
    doubled = noise()(BATCHES[batch](), 1)
    plain, model = diffusing.model().double().train(), installed(kind)
    expected, found = block_by_block(plain, doubled), summed(model, doubled)

    expected.backward()
    found.backward()
    assert abs(float(found - expected)) < 1e-6 * float(expected)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():  # norms and eager's softmax compute in float32 even here
        assert float((parameter.grad - gradients[name]).norm()) < 1e-6 * float(gradients[name].norm()), name


@torch.no_grad()
def states(model: Any, doubled: dict[str, Any]) -> Tensor:
    """Return the last hidden states [B, 2L, H]."""
    given = {name: value for name, value in doubled.items() if "labels" not in name}
    hidden: Tensor = model(**given, output_hidden_states=True).hidden_states[-1]
    return hidden


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_block_moves_later_noisy_blocks_and_no_others(kind: str) -> None:
    """Exactly nothing leaks into its own block, which it would tell the answer, and into those before."""
    doubled, model = noise()(rows(1, 20, prompt=0), 0), installed(kind)
    before = states(model, doubled)
    changed = doubled["input_ids"].clone()
    changed[0, 20 + 9] += 1  # of block 2
    moved = (states(model, {**doubled, "input_ids": changed}) - before)[0].abs().amax(-1)

    noisy, clean = moved[:20].reshape(5, 4).amax(1), moved[20:].reshape(5, 4).amax(1)
    assert [False, False, False, True, True] == noisy.ne(0).tolist()
    assert [False, False, True, True, True] == clean.ne(0).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_noise_stays_in_its_block(kind: str) -> None:
    """A noisy token is seen by its own noisy block alone, all of it."""
    doubled, model = noise()(rows(1, 12, prompt=0), 0), installed(kind)
    before = states(model, doubled)
    changed = doubled["input_ids"].clone()
    changed[0, 7] += 1
    moved = (states(model, {**doubled, "input_ids": changed}) - before)[0].abs().amax(-1).ne(0)
    assert [4, 5, 6, 7] == moved.nonzero().flatten().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_real_tokens_do_not_see_padding(kind: str) -> None:
    """The same sample in a batch of its own length and in a longer one (axolotl pull request 3735)."""
    model = installed(kind)
    batch = ragged([6, 18])
    alone = noise()({name: value[:1, :6] for name, value in batch.items()}, 0)
    beside = noise()(batch, 0)
    found = states(model, beside)[0].unflatten(0, (2, 20))[:, :8]
    torch.testing.assert_close(found, states(model, alone)[0].unflatten(0, (2, 8)), rtol=1e-9, atol=1e-12)


def test_the_loss_is_not_shifted_and_of_the_noisy_half_alone() -> None:
    """Logits that are sure of the token at its own place have no loss."""
    model = installed("sdpa")
    doubled = noise(1.0, 1.0)(rows(), 0)
    length = doubled[DOUBLED].length
    right = functional.one_hot(doubled["input_ids"][:, length:], 320).double() * 60
    seen = []

    def answer(module: Any, args: Any, output: Tensor) -> Tensor:
        seen.append(output.shape)
        return right

    model.lm_head.register_forward_hook(answer)
    assert float(model(**doubled).loss) < 1e-12
    assert [(2, length, 320)] == seen


def test_a_prefix_sees_its_block_and_those_before() -> None:
    """The decoder's mask: the clean part of the rule."""
    assert torch.equal(by_hand(12, 4)[12:, 12:], added(prefix_rule(4), 1, 12)[0])


# ---- what it costs ----


class Square(TorchDispatchMode):
    """Notes the memory of each tensor of floating-point numbers that ends in [length, length]."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.kept, self.made = length, [], set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-2:] == (self.length,) * 2:
                self.kept.append(value)  # or its memory would be another's
                self.made.add(value.untyped_storage().data_ptr())
        return result


@contextmanager
def squares(length: int) -> Iterator[Square]:
    with Square(length) as seen:
        yield seen


def test_sdpa_has_one_dense_mask_for_all_layers() -> None:
    """Of five layers, forward and backward."""
    doubled, model = noise()(ragged([40, 21]), 0), installed("sdpa", num_hidden_layers=5)
    with squares(80) as seen:
        model(**doubled).loss.backward()
    assert 1 == len(seen.made)


def test_flex_attention_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer gets one object that knows its rule; nothing of the size of all pairs is kept, no number is made."""
    given = []

    def attend(query: Tensor, key: Tensor, value: Tensor, block_mask: Any = None, **kwargs: Any) -> Tensor:
        given.append(block_mask)
        return query

    monkeypatch.setattr(FLEX, attend)
    doubled, model = noise()(ragged([400, 210]), 0), installed("flex_attention", num_hidden_layers=3)
    with squares(800) as seen:
        model(**doubled).loss.backward()

    assert set() == seen.made
    assert 3 == len(given)
    assert 1 == len({id(mask) for mask in given})
    kept = [value for value in given[0].as_tuple(flatten=False) if isinstance(value, Tensor)]
    assert sum(value.numel() for value in kept) < 800 * 8


def test_rows_that_are_alike_share_a_mask() -> None:
    """Whole rows of one document: [1, 1, 2L, 2L], whatever the number of rows."""
    made: Callable[..., Any] = functools.partial(noise(), step=0)
    assert made(rows(8))[DOUBLED].whole
    assert not made(ragged([12, 5]))[DOUBLED].whole
    assert not made(packed([8, 4]))[DOUBLED].whole
    assert MASK == made(rows(8))["input_ids"].min()


@pytest.mark.parametrize(("device", "compiled"), [("cpu", False), ("cuda", True), ("xpu", True)])
def test_a_block_mask_is_compiled_on_every_device_but_a_cpu(
    device: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made without, it is dense for a moment."""
    from torch.nn.attention import flex_attention

    given: list[Any] = []
    monkeypatch.setattr(flex_attention, "create_block_mask", lambda *args, **kwargs: given.append(kwargs))
    attention_mask("flex_attention", doubled_rule(None, 8, 4), 1, 16, torch.float32, torch.device(device))
    assert [{"device": device, "_compile": compiled}] == given
