"""The native state of one process: what is in it, what a fresh optimizer gets back, and files from hostile hands."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from torchturbo.checkpoint import native
from torchturbo.checkpoint.safe_metadata import read_index

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Two layers, of which the second may never get a gradient, a tied weight and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.used.weight
        self.register_buffer("count", torch.tensor(float(seed)))


def stepped(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model.used(torch.full((2, 4), 1.0 + step)).square().sum().backward()  # type: ignore[operator]
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.9)),
    "amsgrad, tensor rate": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(1e-2), amsgrad=True, foreach=False
    ),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_optimizer_goes_on_as_the_saved_one(name: str, tmp_path: Path) -> None:
    """States, settings and rates; the raw state dict of a fresh optimizer would have had no entry to load into."""
    models = [Net(0), Net(1)]
    first, second = (OPTIMIZERS[name](model.parameters()) for model in models)
    stepped(models[0], first)
    first.param_groups[0]["initial_lr"], first.param_groups[0]["lr"] = 0.5, 0.25
    native.save(native.capture(models[0], first), tmp_path)

    native.load_model(models[1], tmp_path)
    native.load_optimizer(models[1], second, tmp_path)

    assert (0.5, 0.25) == (second.param_groups[0]["initial_lr"], float(second.param_groups[0]["lr"]))
    assert [type(value) for key, value in first.param_groups[0].items() if key not in ("lr", "params")] == [
        type(second.param_groups[0][key]) for key in first.param_groups[0] if key not in ("lr", "params")
    ]
    for model, optimizer in zip(models, (first, second), strict=True):
        stepped(model, optimizer)
    for (weight, one), (_, other) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.equal(one, other), weight
    assert 0.0 == float(models[1].count)  # type: ignore[arg-type]


def test_a_parameter_without_a_gradient_has_no_state_after_a_load_either(tmp_path: Path) -> None:
    """One made of zeros would count a step that was never taken."""
    models = [Net(0), Net(1)]
    first, second = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models)
    stepped(models[0], first)
    native.save(native.capture(models[0], first), tmp_path)
    native.load_optimizer(models[1], second, tmp_path)
    expected = {name for name, parameter in models[0].named_parameters() if parameter in first.state}
    assert {"used.weight", "used.bias"} == expected
    assert expected == {name for name, parameter in models[1].named_parameters() if parameter in second.state}


def test_a_tied_weight_is_written_once_and_nothing_is_pickled(tmp_path: Path) -> None:
    """The index knows tensors alone."""
    model = Net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    native.save(native.capture(model, optimizer), tmp_path)
    found = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    names = {name.removeprefix("model.") for name in found if name.startswith("model.")}
    assert {"used.weight", "used.bias", "idle.weight", "idle.bias", "count"} == names
    assert not any(isinstance(entry, BytesStorageMetadata) for entry in found.values())
    assert {"optim.state.used.weight.exp_avg", "optim.state.used.weight.step"} < found.keys()


def test_what_belongs_to_another_model_is_refused_by_name(tmp_path: Path) -> None:
    """Weights that lack some, that are too many, of another size; an optimizer of other parameters."""
    model = Net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    native.save(native.capture(model, optimizer), tmp_path)
    more, fewer, wider = Net(0), Net(0), Net(0)
    more.extra = nn.Linear(1, 1)
    fewer.idle = nn.Identity()  # type: ignore[assignment]
    wider.idle = nn.Linear(4, 5)
    for other, words in (
        (more, "its weights lack 2 of the model's: extra.bias, extra.weight"),
        (fewer, "the model has not 2 of its weights: idle.bias, idle.weight"),
        (wider, r"its idle.weight is \[3, 4\], the model's is \[5, 4\]"),
    ):
        with pytest.raises(ValueError, match=words):
            native.load_model(other, tmp_path)
    for other, words in (
        (more, "its optimizer does not know 2 of the trained parameters: extra.bias, extra.weight"),
        (fewer, "its optimizer has 2 parameters that are not trained now: idle.bias, idle.weight"),
    ):
        with pytest.raises(ValueError, match=words):
            native.load_optimizer(other, torch.optim.AdamW(other.parameters()), tmp_path)


def test_other_groups_take_each_parameters_own_settings(tmp_path: Path) -> None:
    """Groups may be split or joined, as long as one group's parameters had the same."""
    model = Net(0)
    groups = [{"params": [model.used.weight], "weight_decay": 0.5}, {"params": [*model.idle.parameters()]}]
    native.save(native.capture(model, torch.optim.AdamW(groups, lr=1e-2)), tmp_path)
    split = [{"params": [model.idle.bias]}, {"params": [model.used.weight]}, {"params": [model.idle.weight]}]
    made = torch.optim.AdamW(split)
    native.load_optimizer(model, made, tmp_path)
    assert [0.01, 0.5, 0.01] == [group["weight_decay"] for group in made.param_groups]
    joined = torch.optim.AdamW([model.used.weight, *model.idle.parameters()])
    with pytest.raises(ValueError, match=r"had other settings for used.weight than for idle.weight"):
        native.load_optimizer(model, joined, tmp_path)


def test_parameters_of_something_else_are_refused() -> None:
    """A checkpoint could not say whose they are."""
    with pytest.raises(ValueError, match="the optimizer has 4 parameters that are not the model's"):
        native.capture(Net(0), torch.optim.AdamW(Net(0).parameters()))


def test_a_state_that_is_no_tensor_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """It would have to be pickled."""
    model = Net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    optimizer.state[model.used.weight]["history"] = object()
    with pytest.raises(ValueError, match=r"the optimizer's history of used.weight is a object, which can't be saved"):
        native.capture(model, optimizer)


def test_a_snapshot_does_not_change_with_the_run() -> None:
    """Training goes on while it is written."""
    model = Net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    live = native.capture(model, optimizer)
    copy = native.snapshot(live)
    before = {name: tensor.clone() for part in copy.tensors.values() for name, tensor in part.items()}
    stepped(model, optimizer)
    after = {name: tensor for part in copy.tensors.values() for name, tensor in part.items()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not torch.equal(before["used.weight"], live.tensors["model"]["used.weight"])


# ---- hostile files ----


class Trap:
    """An object whose unpickling makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Net(0)
    native.save(native.capture(model, torch.optim.AdamW(model.parameters())), tmp_path / "native")
    return tmp_path / "native"


def write_index(folder: Path, change: Callable[[Any], Any]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(index) or index))


def of(index: Any, name: str = "model.count") -> Any:
    return next(value for key, value in index.storage_data.items() if key.fqn == name)


def cut(index: Any, *chunks: tuple[tuple[int, ...], tuple[int, ...]], size: tuple[int, ...] = (2, 3)) -> None:
    """Cut a weight into parts of some offsets and sizes, and say of each where it lies."""
    name = "model.used.weight"
    entry, place = index.state_dict_metadata[name], of(index, name)
    entry.size = torch.Size(size)
    entry.chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    for offsets, _ in chunks:
        index.storage_data[MetadataIndex(name, torch.Size(offsets))] = place


HOSTILE: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "a bomb for an index": (lambda index, marker: Trap(marker), "it names posix.mkdir"),
    "a bomb inside it": (lambda index, marker: setattr(index, "planner_data", Trap(marker)), "it names posix.mkdir"),
    "a bomb for a name": (lambda index, marker: setattr(of(index), "relative_path", Trap(marker)), "posix.mkdir"),
    "bytes": (
        lambda index, marker: index.state_dict_metadata.update({"optim.x": BytesStorageMetadata()}),
        "it names torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    ),
    "a file elsewhere": (lambda index, marker: setattr(of(index), "relative_path", "../x"), "is no data file of this folder"),
    "an absolute file": (lambda index, marker: setattr(of(index), "relative_path", "/etc/passwd"), "is no data file"),
    "a transformed file": (lambda index, marker: setattr(of(index), "transform_descriptors", ["zstd"]), "transformed"),
    "a negative place": (lambda index, marker: setattr(of(index), "offset", -5), "a size that is none"),
    "a place that is missing": (lambda index, marker: index.storage_data.popitem() and None, "does not say where"),
    "a part that is missing": (
        lambda index, marker: index.state_dict_metadata["model.used.weight"].chunks.clear(),
        "parts do not make a whole",
    ),
    "one part twice": (
        lambda index, marker: cut(index, ((0, 0), (1, 3)), ((0, 0), (1, 3))), "parts do not make a whole",
    ),
    "parts that overlap": (
        lambda index, marker: cut(index, ((0, 0), (2, 2)), ((0, 1), (2, 1))), "parts do not make a whole",
    ),
    "a part beyond the end": (
        lambda index, marker: cut(index, ((0, 0), (1, 3)), ((2, 0), (1, 3))), "parts do not make a whole",
    ),
    "parts that leave a corner": (
        lambda index, marker: cut(
            index, ((0, 0), (1, 1)), ((0, 1), (1, 2)), ((1, 0), (1, 1)), ((0, 1), (1, 2))
        ), "parts do not make a whole",
    ),
    "a part of fewer dimensions": (lambda index, marker: cut(index, ((0,), (6,))), "parts do not make a whole"),
    "a size that is a text": (
        lambda index, marker: setattr(index.state_dict_metadata["model.count"], "size", "x"), "a size that is none",
    ),
    "a list": (lambda index, marker: [1, 2], "expected Metadata, got list"),
    "its dictionary alone": (lambda index, marker: vars(index), "expected Metadata, got dict"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_index_of_hostile_hands_runs_nothing(kind: str, folder: Path, tmp_path: Path) -> None:
    """It is refused with the reason, before a tensor is read."""
    change, words = HOSTILE[kind]
    write_index(folder, lambda index: change(index, tmp_path / "ran"))
    with pytest.raises(pickle.UnpicklingError, match=re.escape(words)):
        read_index(folder)
    with pytest.raises(pickle.UnpicklingError):
        native.load_model(Net(1), folder)
    assert not (tmp_path / "ran").exists()


def test_parts_of_any_mesh_make_a_whole(folder: Path) -> None:
    """Grids of one, two and three dimensions, uneven ones, in any order, and ranks that got nothing."""
    for size, cuts in (
        ((4,), ([0, 4],)),
        ((5,), ([0, 2, 4, 5, 5],)),
        ((5, 3), ([0, 3, 5], [0, 3])),
        ((5, 7), ([0, 3, 5, 5], [0, 2, 4, 6, 7])),
        ((64, 3, 64), (list(range(65)), [0, 3], list(range(0, 65, 2)))),
        ((), ()),
        ((0, 3), ([0, 0], [0, 3])),
    ):
        spans = [[(start, stop - start) for start, stop in itertools.pairwise(at)] for at in cuts]
        cells = [tuple(zip(*cell, strict=True)) or ((), ()) for cell in itertools.product(*spans)]
        random.Random(0).shuffle(cells)
        write_index(folder, lambda index, cells=cells, size=size: cut(index, *cells, size=size))
        assert len(cells) == len(read_index(folder).state_dict_metadata["model.used.weight"].chunks)


def test_every_byte_of_an_index_may_be_wrong(folder: Path) -> None:
    """It loads or it is refused, and nothing else comes of it."""
    whole = (folder / ".metadata").read_bytes()
    for at in range(0, len(whole), 7):
        for changed in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            (folder / ".metadata").write_bytes(changed)
            try:
                read_index(folder)
            except pickle.UnpicklingError:
                continue


def test_an_index_cannot_change_the_classes_that_it_names(folder: Path) -> None:
    """A pickle may set attributes of what it is given; it is given classes of its own."""
    program = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x04\x00\x00\x00evilK\x01s\x86b."
    pickle.loads(program)
    assert 1 == Metadata.evil  # type: ignore[attr-defined]
    del Metadata.evil  # type: ignore[attr-defined]
    (folder / ".metadata").write_bytes(program)
    with pytest.raises(pickle.UnpicklingError):
        read_index(folder)
    assert not hasattr(Metadata, "evil")


def test_a_bomb_for_a_tensor_is_not_run(folder: Path, tmp_path: Path) -> None:
    """In the very place where the index says that a weight lies."""
    archive = io.BytesIO()
    torch.save(Trap(tmp_path / "ran"), archive)
    (data,) = folder.glob("*.distcp")
    end = data.stat().st_size
    data.write_bytes(data.read_bytes() + archive.getvalue())

    def there(index: Any) -> None:
        of(index, "model.used.weight").offset, of(index, "model.used.weight").length = end, len(archive.getvalue())

    write_index(folder, there)
    with pytest.raises(ValueError, match="__0_0.distcp holds other things than tensors, so it is not loaded"):
        native.load_model(Net(1), folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"groups": [5], "values": {}}', '{"groups": [], "values": 5}', "[" * 100_000], ids=len
)
def test_optimizer_settings_of_another_shape_are_damaged(text: str, folder: Path) -> None:
    """Valid JSON or not."""
    (folder / "optimizer.json").write_text(text)
    model = Net(1)
    with pytest.raises(ValueError, match="optimizer.json is damaged"):
        native.load_optimizer(model, torch.optim.AdamW(model.parameters()), folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("betas", [1]), ("betas", 0.9), ("betas", [0.9, "0.99"]), ("betas", [0.9, float("nan")]), ("lr", "nan"),
        ("lr", float("nan")), ("lr", float("inf")), ("lr", None), ("lr", True), ("amsgrad", 1), ("amsgrad", "yes"),
        ("eps", [1e-8]), ("lr", {"a": 1}), ("betas", [[0.9], 0.99]),
    ],
    ids=str,
)  # fmt: skip
def test_optimizer_settings_that_are_none_are_refused(name: str, value: Any, folder: Path) -> None:
    """Before the first step meets them; the optimizer keeps its own."""
    found = json.loads((folder / "optimizer.json").read_text())
    for group in found["groups"]:
        group["options"][name] = value
    (folder / "optimizer.json").write_text(json.dumps(found))
    model = Net(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with pytest.raises(ValueError, match=rf"optimizer.json (has {name} = .*, expected one like|is damaged)"):
        native.load_optimizer(model, optimizer, folder)
    assert (0.5, (0.9, 0.999)) == (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"])


def test_adapters_alone_are_saved_of_a_model_with_adapters(tmp_path: Path) -> None:
    """The base model's weights come from its own folder."""
    peft = pytest.importorskip("peft")

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return peft.get_peft_model(
            tiny.model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        )

    first, second = made(0), made(1)
    native.save(native.capture(first, None), tmp_path)
    names = {name.removeprefix("model.") for name in FileSystemReader(tmp_path).read_metadata().state_dict_metadata}
    trained = {name for name, parameter in first.named_parameters() if parameter.requires_grad}
    assert trained == names
    assert any("lora_" in name for name in names)
    assert any("modules_to_save" in name for name in names)
    native.load_model(second, tmp_path)
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other), name


def test_torchs_own_tools_read_it(folder: Path, tmp_path: Path) -> None:
    """The format is torch's, not one of our own."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(Net(0).used.weight, found["model"]["used.weight"])
    assert json.loads((folder / "optimizer.json").read_text())["groups"][0]["options"]["lr"] == 1e-3
