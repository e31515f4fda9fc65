"""The noise of block diffusion: what is hidden, how much of it, what is learned, and that a resumed run repeats it."""

from __future__ import annotations

from typing import Any

import diffusing
import pytest
import torch
from diffusing import BLOCK, FILL, MASK, noise, packed, ragged, rows
from torch import Tensor

from torchturbo.objectives.diffusion.noise import DOUBLED, EVALUATION, Doubled
from torchturbo.objectives.documents import numbers_of
from torchturbo.observe.tokens import doubled as counted


def halves(doubled: dict[str, Any], name: str = "input_ids") -> tuple[Tensor, Tensor]:
    """Return the noisy and the clean half."""
    length = doubled[DOUBLED].length
    return doubled[name][:, :length], doubled[name][:, length:]


def test_every_sample_has_a_rate_of_its_own_within_the_bounds() -> None:
    """10,000 samples: sigma is uniform in [0.3, 0.8], and the hidden share of a sample is about its sigma."""
    batch = rows(10_000, 64, prompt=0)
    hidden = noise(0.3, 0.8)(batch, 0)["labels"].ne(-100)
    rates = hidden.double().mean(1)
    wide = 4 * (0.25 / 64) ** 0.5  # four standard deviations of a share of 64 tokens

    assert rates.min() > 0.3 - wide
    assert rates.max() < 0.8 + wide
    assert abs(float(rates.mean()) - 0.55) < 0.005
    # The variance of uniform rates, and that of drawing each of 64 tokens.
    expected = 0.5**2 / 12 + (0.55 - (0.55**2 + 0.5**2 / 12)) / 64
    assert abs(float(rates.var()) - expected) < 0.001


def test_within_a_sample_every_token_is_drawn_by_itself() -> None:
    """Neighbours are hidden together as often as chance has it."""
    hidden = noise(0.5, 0.5)(rows(4_000, 16, prompt=0), 0)["labels"].ne(-100).double()
    assert abs(float(hidden.mean()) - 0.5) < 0.01
    assert abs(float((hidden[:, 1:] * hidden[:, :-1]).mean()) - 0.25) < 0.01


def test_labels_are_exactly_where_tokens_are_hidden_and_not_shifted() -> None:
    """The right token stands at its own place, and nothing else changes."""
    batch = ragged([12, 9, 5])
    doubled = noise()(batch, 0)
    noisy, clean = halves(doubled)
    hidden = doubled["labels"].ne(-100)

    assert hidden.any()
    assert torch.equal(noisy[hidden], torch.full_like(noisy[hidden], MASK))
    assert torch.equal(clean[hidden], doubled["labels"][hidden])
    assert torch.equal(noisy[~hidden], clean[~hidden])
    assert torch.equal(clean[0], batch["input_ids"][0])
    assert torch.equal(doubled["shift_labels"], doubled["labels"])


def test_a_prompt_is_never_hidden() -> None:
    """At any noise."""
    doubled = noise(1.0, 1.0)(rows(50, 12, prompt=5), 0)
    noisy, clean = halves(doubled)
    assert torch.equal(noisy[:, :5], clean[:, :5])
    assert bool(doubled["labels"][:, :5].eq(-100).all())
    assert bool(noisy[:, 5:].eq(MASK).all())


def test_no_noise_hides_nothing() -> None:
    """Nothing is to be learned then."""
    doubled = noise(0.0, 0.0)(rows(), 0)
    assert bool(doubled["labels"].eq(-100).all())
    assert torch.equal(*halves(doubled))


def test_a_mask_token_of_the_text_itself_is_no_target() -> None:
    """What was drawn decides, not what a token looks like."""
    batch = rows(1, 8, prompt=0)
    batch["input_ids"][:, 3] = batch["labels"][:, 3] = MASK
    assert bool(noise(0.0, 0.0)(batch, 0)["labels"].eq(-100).all())


def test_the_last_block_is_filled_up_and_learned_and_what_a_batch_adds_is_neither() -> None:
    """Three rows of 12, 9 and 5 tokens: 12, 12 and 8 in whole blocks of 4, in a batch of 12."""
    doubled = noise(1.0, 1.0)(ragged([12, 9, 5]), 0)
    _, clean = halves(doubled)
    documents, again = halves(doubled, "attention_mask")

    assert [12, 12, 8] == documents.sum(1).tolist()
    assert torch.equal(documents, again)
    assert [FILL] * 3 == clean[1, 9:].tolist()
    assert [FILL] * 3 == doubled["labels"][1, 9:].tolist()
    assert [-100] * 4 == doubled["labels"][2, 8:].tolist()


@pytest.mark.parametrize(("cutoff", "block", "length"), [(33, 32, 64), (64, 32, 64), (1, 4, 4), (7, 3, 9), (5, 1, 5)])
def test_a_sequence_is_whole_blocks(cutoff: int, block: int, length: int) -> None:
    """Always divisible."""
    doubled = noise(block_size=block)(rows(1, cutoff, prompt=0), 0)
    assert length == doubled[DOUBLED].length
    assert (1, 2 * length) == doubled["input_ids"].shape


def test_a_doubled_sequence_divides_by_the_ranks_that_share_it() -> None:
    """And by the block still."""
    assert 12 == noise(divisor=3)(rows(1, 5), 0)[DOUBLED].length


def test_positions_count_both_halves_alike_and_documents_begin_at_blocks() -> None:
    """Documents of 6 and 5 tokens: 8 and 8."""
    doubled = noise()(packed([6, 5]), 0)
    positions, again = halves(doubled, "position_ids")
    documents, _ = halves(doubled, "attention_mask")

    assert [*range(8), *range(8)] == positions[0].tolist() == again[0].tolist()
    assert [1] * 8 + [2] * 8 == documents[0].tolist()


def test_documents_of_a_packed_row_have_rates_of_their_own() -> None:
    """Each is a sample."""
    batch = packed([400, 400], prompt=0)
    first, second = noise()(batch, 0)["labels"].ne(-100).double().reshape(2, 400).mean(1)
    assert abs(float(first - second)) > 0.1


# ---- documents, however a collator tells of them ----

NUMBERS = [[1, 1, 1, 2, 2, 0, 0]]


def by_mask() -> dict[str, Tensor]:
    return {"attention_mask": torch.tensor(NUMBERS)}


def by_square_mask() -> dict[str, Tensor]:
    numbers = torch.tensor(NUMBERS)
    same = (numbers[:, :, None] == numbers[:, None, :]) & numbers.ne(0)[:, None, :]
    return {"attention_mask": (same & torch.ones(7, 7).tril().bool())[:, None]}


def by_added_mask() -> dict[str, Tensor]:
    seen = by_square_mask()["attention_mask"]
    return {"attention_mask": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)}


def by_positions_and_mask() -> dict[str, Tensor]:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0]])
    return {"position_ids": positions, "attention_mask": torch.tensor(NUMBERS).clamp(max=1)}


def by_short_positions() -> dict[str, Tensor]:
    """As LLaMA-Factory packs: its tokens are padded to a multiple of eight, and their positions are not."""
    return {"position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "attention_mask": torch.tensor(NUMBERS).clamp(max=1)}


TELLING = {
    "numbers": by_mask,
    "bool pairs": by_square_mask,
    "added to scores": by_added_mask,
    "positions": by_positions_and_mask,
    "short positions": by_short_positions,
}


@pytest.mark.parametrize("told", list(TELLING))
def test_documents_are_found(told: str) -> None:
    """A number for each document, 0 for padding: as collators of Transformers and of LLaMA-Factory tell of them."""
    batch = {"input_ids": torch.arange(7)[None], **TELLING[told]()}
    assert NUMBERS == numbers_of(batch).tolist()


@pytest.mark.parametrize("told", list(TELLING))
def test_what_tells_of_documents_makes_no_difference(told: str) -> None:
    """The doubled batch is the same."""
    ids = torch.tensor([[11, 12, 13, 14, 15, FILL, FILL]])
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids.eq(FILL), -100)}
    expected = noise()({**batch, **by_mask()}, 3)
    found = noise()({**batch, **TELLING[told]()}, 3)
    assert all(torch.equal(expected[name], found[name]) for name in expected if name != DOUBLED)


def test_padding_on_the_left_and_padding_that_no_mask_tells_of() -> None:
    """A sample is what it is, wherever it stands."""
    ids = torch.tensor([[11, 12, 13, 14, 15]])
    plain = noise()({"input_ids": ids, "labels": ids}, 3)
    fill, none = torch.full((1, 3), FILL), torch.full((1, 3), -100)
    left = {
        "input_ids": torch.cat((fill, ids), 1),
        "labels": torch.cat((none, ids), 1),
        "attention_mask": torch.tensor([[0] * 3 + [1] * 5]),
    }
    silent = {"input_ids": torch.cat((ids, fill), 1), "labels": torch.cat((ids, none), 1)}
    for batch in (left, silent):
        found = noise()(batch, 3)
        assert all(torch.equal(plain[name], found[name]) for name in plain if name != DOUBLED)


def test_a_document_without_a_label_is_left_out() -> None:
    """As packed rows are padded: with one more document."""
    batch = packed([6, 5])
    batch["labels"][:, 6:] = -100
    assert 8 == noise()(batch, 0)[DOUBLED].length


def test_a_row_without_a_label_is_padding_alone() -> None:
    """One block of it, so that every rank has something to run."""
    batch = rows(1)
    batch["labels"][:] = -100
    doubled = noise()(batch, 0)
    assert [0] * 2 * BLOCK == doubled["attention_mask"][0].tolist()
    assert Doubled(BLOCK, BLOCK, whole=False, tokens=12) == doubled[DOUBLED]


# ---- the draws ----


def drawn(batch: dict[str, Tensor], step: int, **changes: Any) -> list[list[int]]:
    return [row[row != -100].tolist() for row in noise(**changes)(batch, step)["labels"]]


def test_noise_is_fresh_in_every_step_and_another_for_another_seed() -> None:
    """And the same for the same step and seed, whatever else has drawn numbers in between."""
    batch = rows(4)
    seen = [drawn(batch, 0), drawn(batch, 1), drawn(batch, EVALUATION), drawn(batch, 0, seed=1)]
    assert all(one != other for at, one in enumerate(seen) for other in seen[:at])
    torch.rand(7)
    assert seen[0] == drawn(batch, 0)


def test_noise_follows_the_sample_and_not_its_batch() -> None:
    """Other rows beside it, other padding, another order: what a rank or a resumed run has is what another one has."""
    batch = ragged([12, 9, 5])
    every = drawn(batch, 2)
    turned = {name: value.flip(0) for name, value in batch.items()}
    alone = {name: value[1:2, :9] for name, value in batch.items()}
    assert every[::-1] == drawn(turned, 2)
    assert every[1:2] == drawn(alone, 2)


def test_drawing_leaves_torchs_generator_alone() -> None:
    """Dropout and shuffling go on as if there were no noise."""
    before = torch.get_rng_state()
    noise()(rows(), 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"input_ids": torch.ones(1, 4)}, "expected labels"),
        ({"inputs_embeds": torch.ones(1, 4, 2), "labels": torch.ones(1, 4)}, "expected input_ids"),
        (diffusing.rows() | {"pixel_values": torch.ones(1)}, "pixel_values"),
    ],
    ids=["no labels", "no tokens", "pictures"],
)
def test_what_has_no_place_in_a_doubled_sequence_is_refused(batch: dict[str, Tensor], told: str) -> None:
    """By its name."""
    with pytest.raises(ValueError, match=told):
        noise()(batch, 0)


@pytest.mark.parametrize(
    "batch", [rows, lambda: ragged([12, 9, 5]), lambda: packed([6, 5, 9])], ids=["equal", "ragged", "packed"]
)
def test_utilisation_counts_a_doubled_batch_as_the_one_it_was_made_of(batch: Any) -> None:
    """The meter sees it after its noise."""
    plain = batch()
    assert counted(plain, (), BLOCK).tolist() == counted(noise()(plain, 0), (), BLOCK).tolist()
