"""Weights read into sharded models against ``from_pretrained``, bit for bit, and how much each rank reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkpoint import families
from tests.ranks import RankFailed, run_ranks


class Loaded(NamedTuple):
    family: str
    differences: list[str]
    """Names of the tensors that are not those of ``from_pretrained``."""
    bytes_read: int
    most_at_once: int
    total: int
    """Bytes of the checkpoint's tensors."""
    largest: int
    tied: tuple[bool, bool]
    """Whether the head is tied to the embeddings, and whether it should be."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("families")
    return {family: families.save(parent / family, family) for family in families.FAMILIES}


Layout = tuple[str, int, int]
"""A family, the ranks that its experts are divided over, and the dimension of theirs that FSDP2 shards."""

TWO: list[Layout] = [
    *((family, 2, 1) for family in families.FAMILIES),
    *((family, 1, 0) for family in ("qwen3_moe", "fused")),
]
FOUR: list[Layout] = [(family, 2, 1) for family in ("untied", "qwen3_moe", "deepseek_v3")]
STRIDED: list[Layout] = [(family, 2, 0) for family in ("qwen3_moe", "fused")]
EVERY: list[Layout] = [
    (family, ep_size, dim) for family in families.FAMILIES for ep_size in (1, 2, 4) for dim in (0, 1)
]


def load_all(rank: int, folders: dict[str, Path], layouts: list[Layout]) -> list[Loaded]:
    import torch
    from transformers import AutoModelForCausalLM

    from torchturbo.checkpoint.weights import WeightSource

    done = []
    for family, ep_size, dim in layouts:
        folder = folders[family]
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = families.empty(folder)
        model.model.layers[0].requires_grad_(False)
        trained = [parameter.requires_grad for parameter in model.parameters()]
        families.shard(model, ep_size, dim)
        source = WeightSource.find(str(folder))
        reader = source.load(model)
        assert trained == [parameter.requires_grad for parameter in model.parameters()]
        total = sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in source.stored.values())
        largest = max(parameter.numel() for parameter in model.parameters()) * 2  # in the files' bf16
        tied = tuple(one.lm_head.weight is one.model.embed_tokens.weight for one in (model, reference))
        found = families.differences(model, reference)
        done.append(Loaded(family, found, reader.bytes_read, reader.most_at_once, total, largest, tied))
    return done


@pytest.mark.parametrize(
    ("world", "layouts"), [(2, TWO), (4, FOUR), pytest.param(4, EVERY, marks=pytest.mark.full)], ids=["2", "4", "all"]
)
def test_each_rank_reads_its_share_and_the_model_is_whole(
    folders: dict[str, Path], world: int, layouts: list[Layout]
) -> None:
    for (_, ep_size, dim), *family in zip(layouts, *run_ranks(world, load_all, folders, layouts), strict=True):
        assert [one.differences for one in family] == [[]] * world, family[0].family
        assert {one.tied for one in family} in ({(True, True)}, {(False, False)})
        if dim == 0 and 1 < ep_size < world:
            continue  # strided shards, see below
        # All of it once, and a router's correction bias, a buffer that every rank holds.
        assert family[0].total <= sum(one.bytes_read for one in family) <= family[0].total * 1.01
        for one in family:  # rows of 321 do not divide: the first rank has one more
            assert one.bytes_read <= one.total / world + 64 * 8
            assert one.most_at_once <= one.largest / world + 64


def test_experts_in_strided_shards_are_whole_too_one_parameter_at_a_time(folders: dict[str, Path]) -> None:
    for rank in run_ranks(4, load_all, folders, STRIDED):
        for one in rank:
            assert one.differences == []
            assert one.most_at_once <= 2 * one.largest  # in fp32, twice the files' bf16


def load_plain(rank: int, folder: Path, dtype: str) -> tuple[list[str], set[str]]:
    import torch
    from transformers import AutoModelForCausalLM

    from torchturbo.checkpoint.weights import WeightSource

    source = WeightSource.find(str(folder))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), device_map="meta")
    source.load(model)
    return families.differences(model, reference), {str(dtype) for dtype in source.dtypes(model).values()}


BUFFERS: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "xglm": {"d_model": 32, "ffn_dim": 48, "attention_heads": 4, "num_layers": 2},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "minimax": {"num_local_experts": 4},
    "llama": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48},
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_that_no_checkpoint_holds_are_computed(kind: str, tmp_path: Path) -> None:
    import torch

    from tests import tiny

    tiny.model(kind, **BUFFERS[kind]).to(torch.bfloat16).save_pretrained(tmp_path)
    differences, formats = load_plain(0, tmp_path, "float32")
    assert differences == []
    assert formats == {"torch.bfloat16"}


def test_a_model_in_the_checkpoints_own_format_is_that_of_from_pretrained(folders: dict[str, Path]) -> None:
    assert load_plain(0, folders["deepseek_v3"], "bfloat16")[0] == []


def fail_on_one(rank: int, folder: Path) -> None:
    from torchturbo.checkpoint import slices, weights

    model = families.empty(folder)
    families.shard(model)
    if rank == 1:

        def read(self: slices.Reader, name: str, region: slices.Region) -> None:
            raise OSError("the disk is gone")

        slices.Reader.read = read  # type: ignore[method-assign, assignment]
    weights.WeightSource.find(str(folder)).load(model)


def test_a_rank_that_cannot_read_ends_all(folders: dict[str, Path]) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fail_on_one, folders["tied"])
    assert sorted(failed.value.failures) == [0, 1]
    assert all("the disk is gone (rank 1)" in text for text in failed.value.failures.values())
