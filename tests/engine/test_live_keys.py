"""Every key: two values of it, the same run, and something that the engine then does differently."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from key_runs import flag, run
from keys_diffusion import CASES as DIFFUSION
from keys_dspark import CASES as DSPARK
from keys_mtp import CASES as MTP
from keys_routers import CASES as ROUTERS
from ranked_keys import RANKED
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForImageTextToText

from torchturbo.errors import ConfigError
from torchturbo.generated.keys import KEYS
from torchturbo.plugins import Plugin, Run

VOCABULARY = 320
PLUGIN = """
from torchturbo.plugins import Plugin, register

@register()
class Marking(Plugin):
    def step_end(self, run):
        (run.output_dir / f"seen-{run.step}").touch()
"""


class Watcher(Plugin):
    """Looks at a run from inside: how its parts are called, and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_calls = 0
        self.layer_with_graph: set[bool] = set()
        self.head_rows = 0
        self.logits_dtype: set[torch.dtype] = set()
        self.micro_batches: list[int] = []
        self.deterministic = False

    def model_built(self, model: Any, run: Run) -> None:
        norm = next(module for name, module in model.named_modules() if name.endswith("input_layernorm"))
        norm.register_forward_pre_hook(self._layer)  # inside what is recomputed

    def before_shard(self, model: Any, run: Run) -> None:
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
        layer.register_forward_hook(lambda module, args, output: self.logits_dtype.add(output.dtype))

    def step_begin(self, micro_batches: Any, run: Run) -> None:
        self.micro_batches.append(len(micro_batches))

    def _layer(self, *args: Any) -> None:
        self.layer_calls += 1
        self.layer_with_graph.add(torch.is_grad_enabled())


def watched(path: str, look: Callable[[Watcher], Any], *words: str) -> Callable[[Any, Path], Any]:
    """Return an observation of a run from inside."""

    def observe(value: Any, folder: Path) -> Any:
        watcher = Watcher()
        run(folder, *words, *flag(path, value), plugins=[watcher])
        return look(watcher)

    return observe


def trained(path: str) -> Callable[[Any, Path], set[str]]:
    """Return an observation of which parts of a vision-language model are trained."""

    def observe(value: Any, folder: Path) -> set[str]:
        trainer = run(folder, *flag(path, value), model=vision_language_model(), max_steps=1)
        names = (name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad)
        return {
            part
            for name in names
            for part in ("vision_tower", "multi_modal_projector", "language_model")
            if part in name
        }

    return observe


def vision_language_model() -> Any:
    text = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=319)
    return AutoModelForImageTextToText.from_config(config)


# ---- what is looked at, key by key ----


def log_lines(value: Any, folder: Path) -> bool:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.levelname)  # type: ignore[method-assign]
    logger = logging.getLogger("torchturbo")
    level = logger.level
    logger.addHandler(handler)
    run(folder, *flag("log_level", value))
    logger.removeHandler(handler)
    logger.setLevel(level)
    return "INFO" in lines


def from_file(value: Any, folder: Path) -> int:
    file = folder / value
    file.write_text("gbs: 3\n" if value == "three.yaml" else "gbs: 1\n")
    return int(run(folder / "out", *flag("config_path", file)).args.gradient_accumulation_steps)


def resumed(value: Any, folder: Path) -> int:
    run(folder, save_strategy="steps", save_steps=1, max_steps=1)
    try:
        words = [*flag("resume_allow", value), *flag("resume_allow", "max_steps")]
        return int(run(folder, *words, resume=True, learning_rate=1e-3).state.global_step)
    except ConfigError:
        return 0


class LogitRows(TorchDispatchMode):
    """Notes the most rows of logits that one tensor holds."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[-1] == VOCABULARY:
            memory = result.untyped_storage().nbytes()  # none where they are expanded from one number
            self.most = max(self.most, memory // (VOCABULARY * result.element_size()))
        return result


def logit_rows(path: str, *words: str) -> Callable[[Any, Path], int]:
    """Return an observation of how many rows of logits exist at once."""

    def observe(value: Any, folder: Path) -> int:
        with LogitRows() as seen:
            run(folder, *words, *flag(path, value), per_device_train_batch_size=8, max_steps=1)
        return seen.most

    return observe


def optimizer(value: Any, folder: Path) -> str:
    return type(run(folder, *flag("optimizer.name", value)).optimizer.optimizer).__name__


def mfu(value: Any, folder: Path) -> Any:
    logs = run(folder, *flag("mfu.enabled", value)).state.log_history
    return "tokens_per_second" in logs[0]


def card(value: Any, folder: Path) -> float:
    """Return MFU over token rate: the peak is the only other factor."""
    logs = run(folder, *flag("mfu.enabled", True), *flag("mfu.card", value)).state.log_history
    return float(f"{logs[0]['mfu'] / logs[0]['tokens_per_second']:.3g}")


def profiled(value: Any, folder: Path) -> bool:
    run(folder, *flag("profiling", value))
    return any((folder / "profiling").glob("*"))


def snapshots(value: Any, folder: Path) -> list[Any]:
    run(folder, *flag("memory_snapshot_steps", value))
    found = [json.loads(path.read_text()) for path in sorted((folder / "memory_snapshot").glob("*.json"))]
    return [one["peak_of_each_step"] for one in found]  # the peak of the whole process is another in each run


def plugins(value: Any, folder: Path) -> int:
    (folder / "marking.py").write_text(PLUGIN)
    (folder / "idle.py").write_text(
        PLUGIN.replace("step_end", "before_shard").replace("(self, run)", "(self, model, run)")
    )
    run(folder, *flag("plugins", folder / value))
    return len(list(folder.glob("seen-*")))


def operators(value: Any, folder: Path) -> str:
    try:
        trainer = run(folder, *flag("ops.policy", value))
    except ConfigError as error:
        return str(error)
    return str(sorted(name for module in trainer.model.modules() for name in vars(module) if name == "forward"))


def exported(value: Any, folder: Path) -> list[str]:
    run(folder, *flag("checkpoint.hf_export", value), save_strategy="steps", save_steps=1, max_steps=1)
    return sorted(path.name for path in (folder / "checkpoint-1").glob("*.safetensors"))


CASES: dict[str, tuple[Any, Any, Callable[[Any, Path], Any]]] = {
    "log_level": ("INFO", "ERROR", log_lines),
    "mixed_precision": ("bf16", "fp32", watched("mixed_precision", lambda seen: seen.logits_dtype)),
    "activation_checkpointing.enabled": (
        True,
        False,
        watched("activation_checkpointing.enabled", lambda seen: seen.layer_calls),
    ),
    "activation_checkpointing.use_reentrant": (
        True,
        False,
        watched("activation_checkpointing.use_reentrant", lambda seen: seen.layer_with_graph),
    ),
    "use_deterministic_algorithms": (
        True,
        False,
        watched("use_deterministic_algorithms", lambda seen: seen.deterministic),
    ),
    "gbs": (2, 3, watched("gbs", lambda seen: seen.micro_batches)),
    "config_path": ("three.yaml", "one.yaml", from_file),
    "resume_allow": ("learning_rate", "weight_decay", resumed),
    "loss_chunk.enabled": (True, False, logit_rows("loss_chunk.enabled", *flag("loss_chunk.chunk_size", 40))),
    "loss_chunk.chunk_size": (40, 60, logit_rows("loss_chunk.chunk_size", *flag("loss_chunk.enabled", True))),
    "freeze_policy.vision_tower": (True, False, trained("freeze_policy.vision_tower")),
    "freeze_policy.multi_modal_projector": (True, False, trained("freeze_policy.multi_modal_projector")),
    "freeze_policy.language_model": (True, False, trained("freeze_policy.language_model")),
    "ops.policy": ("native", "custom", operators),
    "optimizer.name": ("muon", "null", optimizer),
    "mfu.enabled": (True, False, mfu),
    "mfu.card": ("h100", "a100", card),
    "profiling": (True, False, profiled),
    "memory_snapshot_steps": (1, 2, snapshots),
    "checkpoint.hf_export": ("every", "final", exported),
    "plugins": ("marking.py", "idle.py", plugins),
    **DIFFUSION,
    **DSPARK,
    **MTP,
    **ROUTERS,
    **RANKED,
}


ONE_VALUE = {"backend": "fsdp2", "moe.token_dispatcher": "alltoall"}
"""Keys of which no second value exists; what they do is tested where it is done (test_pipeline.py, test_dispatch.py)."""


def test_every_key_is_looked_at() -> None:
    """A new key comes here too; one that has a single value says which."""
    assert KEYS.keys() == CASES.keys() | ONE_VALUE.keys()
    assert all(KEYS[path].choices == (value,) for path, value in ONE_VALUE.items())


@pytest.mark.parametrize("path", CASES)
def test_two_values_of_a_key_make_a_difference(path: str, tmp_path: Path) -> None:
    """Accepted and ignored is what no option may be."""
    first, second, observe = CASES[path]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    assert observe(first, tmp_path / "a") != observe(second, tmp_path / "b")


@pytest.mark.parametrize("path", [path for path in CASES if path not in RANKED])
def test_one_value_twice_makes_none(path: str, tmp_path: Path) -> None:
    """What is looked at depends on the key, not on the run."""
    first, _, observe = CASES[path]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    assert observe(first, tmp_path / "a") == observe(first, tmp_path / "b")
