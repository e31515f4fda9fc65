"""The block decoder: which tokens it keeps at each step, where it stops, and what it sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusing
import parity
import pytest
import torch
from diffusing import MASK
from ranks import run_ranks
from torch import Tensor, nn
from transformers import AutoConfig

from torchturbo.models import register
from torchturbo.objectives.diffusion.decode import decode
from torchturbo.objectives.diffusion.mask import KINDS
from torchturbo.parallel.ulysses import NAME as SHARING

END = 2


class Scripted(nn.Module):
    """Predicts at each place a token with a probability, both of a script, and notes the texts that it is shown."""

    def __init__(self, script: dict[int, tuple[int, float]]) -> None:
        super().__init__()
        self.script, self.texts, self.masks = script, list[list[int]](), list[Tensor]()
        self.embed = nn.Embedding(10, 2)
        self.config: Any = type("Config", (), {"mask_token_id": MASK, "eos_token_id": END, "to_dict": dict})()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        self.texts.append(input_ids[0].tolist())
        self.masks.append(attention_mask[0, 0])
        length = input_ids.shape[1]
        assert list(range(length)) == position_ids[0].tolist()
        probabilities = torch.full((1, length, 10), 1e-9)
        for at in range(length):
            token, probability = self.script.get(at, (9, 0.5))
            probabilities[0, at] = (1 - probability) / 9
            probabilities[0, at, token] = probability
        return type("Output", (), {"logits": probabilities.log()})()


def test_a_step_keeps_what_is_sure_and_at_least_its_share() -> None:
    """A prompt of two and blocks of four: two open places, then four; two steps a block."""
    model = Scripted({2: (5, 0.6), 3: (6, 0.9), 4: (7, 0.99), 5: (8, 0.5), 6: (7, 0.98), 7: (5, 0.97)})
    found = decode(model, [3, 4], block_size=4, max_new_tokens=6, steps=2, threshold=0.95)

    assert [5, 6, 7, 8, 7, 5] == found
    assert [
        [3, 4, MASK, MASK],
        [3, 4, MASK, 6],  # its share is one
        [3, 4, 5, 6, MASK, MASK, MASK, MASK],
        [3, 4, 5, 6, 7, MASK, 7, 5],  # three are above the threshold
    ] == model.texts


def test_above_the_threshold_a_block_takes_one_step() -> None:
    """All at once."""
    model = Scripted(dict.fromkeys(range(8), (5, 0.99)))
    assert [5] * 6 == decode(model, [3, 4], block_size=4, max_new_tokens=6)
    assert 2 == len(model.texts)


def test_without_a_threshold_each_token_takes_a_step() -> None:
    """The default number of steps."""
    model = Scripted(dict.fromkeys(range(8), (5, 0.99)))
    decode(model, [3, 4], block_size=4, max_new_tokens=6, threshold=1.0)
    assert 6 == len(model.texts)


def test_an_answer_ends_with_the_block_of_its_end() -> None:
    """What follows the end in its block is left out, and no further block is written."""
    model = Scripted({2: (5, 0.99), 3: (6, 0.99), 4: (END, 0.99), 5: (END, 0.99), 6: (8, 0.99), 7: (8, 0.99)})
    assert [5, 6] == decode(model, [3, 4], block_size=4, max_new_tokens=40)
    assert 8 == max(map(len, model.texts))


@pytest.mark.parametrize(
    ("named", "generation", "ends"),
    [
        ({"eos_token_id": END, "pad_token_id": 6}, None, [5, 6, 7]),
        ({"eos_token_id": END}, {"eos_token_id": [6, 7]}, [5]),
        ({"eos_token_id": None, "pad_token_id": 6}, {"eos_token_id": None}, [5]),
        ({"eos_token_id": None}, None, [5, 6, 7, END, 8, 8]),
    ],
    ids=["configuration", "generation", "filler", "nothing"],
)
def test_an_answer_ends_with_what_the_model_names_first(
    named: dict[str, Any], generation: dict[str, Any] | None, ends: list[int]
) -> None:
    """Its generation configuration, its configuration, and then what fills up its samples."""
    model = Scripted(
        dict(zip(range(2, 8), [(5, 0.99), (6, 0.99), (7, 0.99), (END, 0.99), (8, 0.99), (8, 0.99)], strict=True))
    )
    for name, value in named.items():
        setattr(model.config, name, value)
    if generation is not None:
        model.generation_config = SimpleNamespace(**generation)  # type: ignore[assignment]
    assert ends == decode(model, [3, 4], block_size=4, max_new_tokens=6)


def test_a_llada2_as_it_is_published_stops_at_its_padding() -> None:
    """Its config.json names no end of a text, and pad_token_id 156892 ends its answers."""
    register()
    published = AutoConfig.for_model("llada2_moe", pad_token_id=156892)
    assert getattr(published, "eos_token_id", None) is None
    model = Scripted(dict.fromkeys(range(12), (7, 0.99)))
    model.config = published
    published.mask_token_id, published.pad_token_id = MASK, 7  # the tokens of the script
    assert [] == decode(model, [3, 4], block_size=4, max_new_tokens=10)
    assert 1 == len(model.texts)


def test_an_answer_is_no_longer_than_was_asked_for() -> None:
    """Though blocks are whole."""
    model = Scripted(dict.fromkeys(range(12), (5, 0.99)))
    assert [5] * 3 == decode(model, [3, 4], block_size=4, max_new_tokens=3)


def test_a_mask_is_never_written() -> None:
    """Though it is the likeliest."""
    model = Scripted(dict.fromkeys(range(8), (MASK, 0.99)))
    assert MASK not in decode(model, [3], block_size=4, max_new_tokens=7)


def test_a_block_sees_itself_and_the_text_before() -> None:
    """As a noisy block does in training."""
    model = Scripted({})
    decode(model, [3], block_size=2, max_new_tokens=3, threshold=0.1)
    open_pairs = model.masks[-1].eq(0).tolist()
    assert [[True, True, False, False]] * 2 + [[True] * 4] * 2 == open_pairs


@pytest.mark.parametrize("kind", KINDS[:2])
def test_every_attention_writes_the_same(kind: str) -> None:
    """And the model is left in training mode."""
    model = diffusing.model(attn_implementation=kind).train()
    expected = decode(diffusing.model(), torch.tensor([5, 6, 7]), block_size=4, max_new_tokens=9, eos_token_id=())
    assert 9 == len(expected)
    assert expected == decode(model, [5, 6, 7], block_size=4, max_new_tokens=9, eos_token_id=())
    assert model.training


def decoded(rank: int) -> tuple[list[int], bool]:
    """Decode with a sharded model; return the answer and whether the root's parameters are sharded afterwards."""
    from torch.distributed.tensor import DTensor

    model = diffusing.model()
    parity.prepared(model, parity.config(), 2, rank)
    answer = decode(model, [5, 6, 7], block_size=4, max_new_tokens=9, eos_token_id=())
    return answer, all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_sharded_ranks_decode_together_as_one() -> None:
    """And have their shards afterwards."""
    expected = decode(diffusing.model(), [5, 6, 7], block_size=4, max_new_tokens=9, eos_token_id=())
    assert [(expected, True)] * 2 == run_ranks(2, decoded)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"block_size": 0}, "at least 1"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"steps": 0}, "at least 1"),
        ({"mask": None}, "no mask token: set mask_token_id"),
        ({"kind": "flash_attention_2"}, "can't express the mask"),
        ({"kind": SHARING}, "release the engine before decoding"),
    ],
    ids=["block", "length", "steps", "mask", "attention", "shared"],
)
def test_what_can_not_be_decoded_is_refused(settings: dict[str, Any], told: str) -> None:
    """By what is wrong."""
    model = diffusing.model(mask_token_id=settings.pop("mask", MASK))
    model.config._attn_implementation_internal = settings.pop("kind", "sdpa")
    with pytest.raises(ValueError, match=told):
        decode(model, [3], **{"block_size": 4, "max_new_tokens": 4} | settings)
