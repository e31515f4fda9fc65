"""Documents and padding: however a batch tells of them, every objective and the meter read the same."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from diffusing import BLOCK, FILL, noise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchturbo.objectives.diffusion.noise import DOUBLED
from torchturbo.objectives.documents import layout_of, numbers_of
from torchturbo.objectives.dspark.anchors import Sequences, draw
from torchturbo.objectives.mtp import labels
from torchturbo.objectives.normalise import IGNORE_INDEX
from torchturbo.objectives.router_losses import valid_tokens
from torchturbo.observe.tokens import tally
from torchturbo.train.batches import Collator, pack

NUMBERS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0, 0]])
IDS = torch.tensor([[11, 12, 13, 21, 22, 23, 24, FILL, FILL]])
LABELS = IDS.masked_fill(NUMBERS == 0, IGNORE_INDEX)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
SEEN = (NUMBERS[:, :, None] == NUMBERS[:, None]).tril() & NUMBERS.ne(0)[:, None]
LOWEST = torch.finfo(torch.float32).min


def added(closed: float) -> Tensor:
    return torch.zeros(SEEN.shape).masked_fill(~SEEN, closed)[:, None]


def flex() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: SEEN[b, q, k], 1, None, 9, 9, device="cpu")


TELLING: dict[str, Any] = {
    "positions": lambda: {"position_ids": POSITIONS},
    "positions of three axes": lambda: {"position_ids": POSITIONS.expand(3, 1, 9)},
    "positions of four axes": lambda: {"position_ids": POSITIONS.expand(4, 1, 9)},
    "positions of tokens alone": lambda: {"position_ids": POSITIONS[:, :7]},
    "positions that restart with every filler": lambda: {"position_ids": POSITIONS * NUMBERS.ne(0)},
    "the same and a mask of ones": lambda: {
        "position_ids": POSITIONS * NUMBERS.ne(0),
        "attention_mask": torch.ones_like(IDS),
    },
    "seq_idx": lambda: {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])},
    "borders": lambda: {"cu_seq_lens_q": torch.tensor([0, 3, 7, 9], dtype=torch.int32)},
    "borders of documents alone": lambda: {"cu_seq_lens_q": torch.tensor([0, 3, 7], dtype=torch.int32)},
    "numbers": lambda: {"attention_mask": NUMBERS},
    "positions and a mask": lambda: {"position_ids": POSITIONS, "attention_mask": NUMBERS.clamp(max=1)},
    "booleans of pairs": lambda: {"attention_mask": SEEN[:, None]},
    "added to scores": lambda: {"attention_mask": added(LOWEST)},
    "a moderate number added": lambda: {"attention_mask": added(-1e4)},
    "minus infinity added": lambda: {"attention_mask": added(-torch.inf)},
    "flex attention": lambda: {"attention_mask": flex()},
    "of each kind of layer": lambda: {"attention_mask": {"full": SEEN[:, None], "sliding": added(LOWEST)}},
}


BY_FILLERS = ("positions", "positions of three axes", "positions of four axes", "seq_idx", "borders")
"""What tells of padding as of one more document, which only its tokens give away."""


def told(by: str) -> dict[str, Any]:
    alike = by in BY_FILLERS or "filler" in by or "the same" in by
    ids = IDS if alike else torch.cat((IDS[:, :7], torch.tensor([[91, 92]])), 1)
    return {"input_ids": ids, "labels": LABELS, **TELLING[by]()}


@pytest.mark.parametrize("by", TELLING)
def test_documents_are_numbered(by: str) -> None:
    """From 1; 0 is padding."""
    assert NUMBERS.tolist() == numbers_of(told(by)).tolist()


@pytest.mark.parametrize("by", TELLING)
def test_all_objectives_and_the_meter_read_the_same(by: str) -> None:
    """No target and no block of a document in another one, no padding among what is counted."""
    batch = told(by)
    anchors, keep = draw(Sequences.of(batch), 9, 0, 0)
    targets = labels.targets(batch, 1, numbers_of(batch))

    assert [0, 1, 3, 4, 5] == anchors[keep].tolist()
    assert [13, -100, -100, 23, 24, -100, -100, -100, -100] == targets[0].tolist()
    assert NUMBERS.bool().tolist() == valid_tokens(batch).tolist()
    counts = tally(batch)
    assert counts is not None
    assert [7, 3**2 + 4**2] == counts.tolist()


@pytest.mark.parametrize("by", [by for by in TELLING if not by.startswith(("flex", "of each"))])
def test_noise_is_the_same(by: str) -> None:
    """A doubled batch is, and so are the tokens that it counts."""
    expected, found = noise()(told("numbers"), 3), noise()(told(by), 3)
    assert 7 == found[DOUBLED].tokens
    assert expected[DOUBLED] == found[DOUBLED]
    assert all(torch.equal(expected[name], found[name]) for name in expected if name != DOUBLED)


def test_biases_are_no_borders() -> None:
    """ALiBi lowers a score with the distance, by a rate for each head."""
    distance = (torch.arange(9)[:, None] - torch.arange(9)).float()
    slopes = torch.tensor([0.84, 0.5, 0.004])[:, None, None]
    mask = (-slopes * distance).masked_fill(distance < 0, LOWEST)[None]
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": mask}

    assert [[1] * 9] == numbers_of(batch).tolist()
    assert 9 == noise()(batch, 0)[DOUBLED].tokens


def test_documents_are_numbered_from_1_behind_padding() -> None:
    """On the left as well."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 2, 2]])
    assert [[0, 0, 1, 1], [1, 1, 2, 2]] == numbers_of({"input_ids": torch.ones(2, 4), "attention_mask": mask}).tolist()


def test_a_chunk_is_no_document() -> None:
    """Where some layers see beyond its border; a kind of layers without a mask sees everything."""
    whole = torch.ones(1, 1, 9, 9).tril().bool()
    chunked = whole & (torch.arange(9)[:, None] // 3 == torch.arange(9) // 3)
    for masks in ({"chunked": chunked, "full": whole}, {"chunked": chunked, "full": None}):
        assert [[1] * 9] == numbers_of({"input_ids": IDS, "attention_mask": masks}).tolist()
    assert [[1, 1, 1, 2, 2, 2, 3, 3, 3]] == numbers_of({"input_ids": IDS, "attention_mask": chunked}).tolist()


def test_fillers_are_known_by_their_labels() -> None:
    """What is learned is none, nor the end of a document that has other tokens; shifted labels tell it as well."""
    batch = {"input_ids": IDS, "position_ids": POSITIONS}
    shifted = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=IGNORE_INDEX)
    same_document = {"input_ids": IDS, "labels": LABELS, "position_ids": torch.arange(9)[None]}

    assert NUMBERS.tolist() == numbers_of({**batch, "shift_labels": shifted}).tolist()
    assert layout_of({**batch, "labels": IDS}).real.all()
    assert layout_of(batch).real.all()
    assert layout_of(same_document).real.all()


def rows(lengths: list[int], cutoff: int) -> dict[str, Tensor]:
    """Return packed rows as they are trained on."""
    examples = [{"input_ids": (row := list(range(30, 30 + length))), "labels": row} for length in lengths]
    return Collator(FILL)(pack(examples, cutoff))


def test_padding_of_packed_rows_counts_nowhere() -> None:
    """75 tokens in two rows of 60: the second's padding is neither a router's nor a doubled batch's."""
    batch = rows([40, 20, 15], 60)

    assert (2, 60) == batch["input_ids"].shape
    assert 75 == int(valid_tokens(batch).sum()) == noise()(batch, 0)[DOUBLED].tokens
    assert 15 == int(valid_tokens({name: value[1:] for name, value in batch.items()}).sum())


def test_a_long_padded_row_is_quick() -> None:
    """32k of which 100 are real, each filler a document of its own: no round for each."""
    length, real = 32_768, 100
    places = torch.arange(length)[None]
    ids = (places % 200 + 30).where(places < real, FILL)
    batch = {
        "input_ids": ids,
        "labels": ids.where(places < real, IGNORE_INDEX),
        "position_ids": places.where(places < real, 0),
        "attention_mask": torch.ones_like(ids),
    }
    noise()(batch, 0)
    start = time.process_time()
    doubled = noise()(batch, 0)
    assert time.process_time() - start < 0.1
    assert real == doubled[DOUBLED].length
    assert 0 == real % BLOCK


def test_two_diagonals_of_a_mask_are_read() -> None:
    """Not its 16 M pairs: nothing as large as the mask is made."""
    length = 4096
    mask = torch.zeros(1, 1, 1, 1).expand(1, 1, length, length)
    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            made.append(found.numel() if isinstance(found, Tensor) else 0)
            return found

    with Sizes():
        numbers_of({"input_ids": torch.ones(1, length, dtype=torch.long), "attention_mask": mask})
    assert max(made) <= length


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention_mask", torch.ones(1, 8), r"expected an attention_mask of 1 x 9 tokens, got \[1, 8\]"),
        ("attention_mask", torch.ones(1, 1, 8, 8), r"expected an attention_mask of 1 x 9 tokens, got \[1, 1, 8, 8\]"),
        ("attention_mask", torch.ones(1, 9, 9), r"or of flex attention, got Tensor\[1, 9, 9\]"),
        ("position_ids", torch.ones(1, 12), r"expected position_ids of 1 x 9 tokens, got \[1, 12\]"),
        ("position_ids", torch.ones(3, 2, 9), r"expected position_ids of 1 x 9 tokens, got \[3, 2, 9\]"),
        ("seq_idx", torch.ones(1, 7), r"expected seq_idx of 1 x 9 tokens, got \[1, 7\]"),
    ],
    ids=["mask", "pairs", "square", "long positions", "positions of other rows", "numbers"],
)
def test_what_does_not_fit_is_an_error_but_for_the_meter(name: str, value: Tensor, message: str) -> None:
    """With both sizes; utilisation is counted for rows then."""
    batch = {"input_ids": IDS, name: value}
    with pytest.raises(ValueError, match=message):
        numbers_of(batch)
    counts = tally(batch)
    assert counts is not None
    assert [9, 81] == counts.tolist()


def test_borders_run_over_rows_laid_end_to_end() -> None:
    borders = torch.tensor([0, 3, 4, 6, 8])
    assert [[1, 1, 1, 2], [1, 1, 2, 2]] == numbers_of(
        {"input_ids": torch.ones(2, 4), "cu_seq_lens_q": borders}
    ).tolist()


def test_a_draft_rotates_by_the_axis_of_time() -> None:
    """Of M-RoPE's three; a fourth in front counts the text's tokens."""
    axes = torch.stack([POSITIONS + 3, POSITIONS, POSITIONS + 1, POSITIONS + 2])
    for positions in (axes, axes[1:]):
        assert POSITIONS.tolist() == Sequences.of({**told("numbers"), "position_ids": positions}).positions.tolist()
