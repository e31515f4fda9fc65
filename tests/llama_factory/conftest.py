"""A stand-in for LLaMA-Factory: its module names and the parts of its surface that the adapter uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchturbo.engine.args import set_torchturbo_args

MODULES = {
    "__init__.py": "",
    "hparams/__init__.py": "",
    "hparams/parser.py": """
        from dataclasses import dataclass
        @dataclass
        class ModelArguments:
            model_name_or_path: str | None = None
            disable_gradient_checkpointing: bool = False
            use_reentrant_gc: bool = True
            quantization_bit: int | None = None
        @dataclass
        class DataArguments:
            dataset: str | None = None
            cutoff_len: int = 2048
        @dataclass
        class TrainingArguments:
            output_dir: str = "out"
            do_train: bool = False
            bf16: bool = False
            learning_rate: float = 5e-5
            max_steps: int = -1
            gradient_checkpointing: bool = False
            use_cpu: bool = False
            dataloader_pin_memory: bool = True
            report_to: None | str | list[str] = None
        @dataclass
        class FinetuningArguments:
            stage: str = "sft"
            finetuning_type: str = "lora"
            freeze_vision_tower: bool = True
            freeze_multi_modal_projector: bool = True
            freeze_language_model: bool = False
            use_muon: bool = False
        @dataclass
        class GeneratingArguments:
            temperature: float = 0.95
        _TRAIN_ARGS = [ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments]
    """,
    "train/__init__.py": "",
    "train/tuner.py": """
        import torchaudio
        from ..hparams import parser
        def get_train_args(args): ...
        def run_exp(args=None, callbacks=None): ...
    """,
    "train/pt/__init__.py": "",
    "train/pt/workflow.py": """
        class CustomTrainer: ...
        def load_model(): ...
    """,
    "train/sft/__init__.py": "",
    "train/sft/workflow.py": """
        class CustomSeq2SeqTrainer: ...
        def load_model(): ...
        def get_dataset(): raise ValueError("Undefined dataset")
    """,
}


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the stand-in for one test and return its folder."""
    import textwrap

    root = tmp_path / "site"
    for name, text in MODULES.items():
        path = root / "llamafactory" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.chdir(tmp_path)
    _forget()
    yield root / "llamafactory"
    _forget()
    set_torchturbo_args(None)


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "llamafactory"]:
        del sys.modules[name]
