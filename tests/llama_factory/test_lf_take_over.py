"""What LLaMA-Factory's arguments look like once the engine has taken over, and what stops a run there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks

from torchturbo.adapters.llama_factory import run as run_module
from torchturbo.adapters.llama_factory.command import Command
from torchturbo.adapters.llama_factory.mapping import FREEZE_FLAGS, accuracy_problems, in_whole_blocks
from torchturbo.adapters.llama_factory.run import run_command, take_over, told
from torchturbo.adapters.llama_factory.said import Arguments, Said
from torchturbo.adapters.llama_factory.trainer import Launch, quantised
from torchturbo.checkpoint import resume
from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.errors import ConfigError


def parsed(**training: Any) -> list[Any]:
    """Return the five holders as ``get_train_args`` leaves them."""
    settings: dict[str, Any] = {
        "bf16": False, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "world_size": 1,
        "use_cpu": True, "device": torch.device("cpu"), "do_train": True, "resume_from_checkpoint": None,
        "output_dir": "out",
    }  # fmt: skip
    return [
        SimpleNamespace(disable_gradient_checkpointing=False, compute_dtype=None, **model_of("")),
        SimpleNamespace(dataset=["a"], cutoff_len=64, template="chatml"),
        SimpleNamespace(**settings | training),
        SimpleNamespace(stage="sft", finetuning_type="lora", lora_rank=4, **dict.fromkeys(FREEZE_FLAGS, True)),
        None,
    ]


def model_of(name: str) -> dict[str, Any]:
    """Return the arguments by which a model is found."""
    return {
        "model_name_or_path": name, "trust_remote_code": False, "model_revision": "main", "cache_dir": None,
        "hf_hub_token": None, "flash_attn": "auto",
    }  # fmt: skip


def launch(*words: str, **said: Any) -> Launch:
    config = build_from_args(parse_torchturbo_args(words)[0], environ={})
    return Launch(config, {name: Said(value, name) for name, value in said.items()})


@pytest.mark.parametrize(
    ("words", "dtype", "bf16"),
    [
        (["--tt_mixed_precision", "bf16"], torch.bfloat16, True),
        (["--tt_mixed_precision", "fp32"], torch.float32, False),
        ([], torch.float32, False),  # LLaMA-Factory would take fp16 where a device has it
    ],
)
def test_number_formats_follow_the_engine(words: list[str], dtype: torch.dtype, bf16: bool) -> None:
    """LLaMA-Factory builds attention masks in its compute_dtype."""
    made = parsed(bf16=not bf16)
    take_over(made, launch(*words))
    assert (dtype, bf16) == (made[0].compute_dtype, made[2].bf16)


@pytest.mark.parametrize("word", ["true", "false"])
def test_its_checkpointing_is_off_whatever_ours_is(word: str) -> None:
    """One owner."""
    made = parsed()
    take_over(made, launch("--tt_gradient_checkpointing", word))
    assert made[0].disable_gradient_checkpointing


def test_its_freeze_flags_are_ours_where_ours_are_set() -> None:
    """And its own where not."""
    made = parsed()
    take_over(made, launch())
    assert [True] * 3 == [getattr(made[3], name) for name in FREEZE_FLAGS]
    take_over(made, launch("--tt_freeze_language_model"))
    assert [False, False, True] == [getattr(made[3], name) for name in FREEZE_FLAGS]


def test_what_a_resume_compares() -> None:
    """Its data and its method."""
    one = launch()
    take_over(parsed(), one)
    assert {
        "dataset": ["a"],
        "cutoff_len": 64,
        "template": "chatml",
        "finetuning_type": "lora",
        "lora_rank": 4,
    }.items() <= (one.facts.items())


@pytest.mark.parametrize(
    ("training", "words", "part"),
    [
        ({"world_size": 2}, ["--tt_gbs", "3"], "--tt_gbs"),
        ({"device": torch.device("xpu")}, [], "xpu"),
    ],
)
def test_what_stops_a_run_before_the_model(
    training: dict[str, Any], words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told once, status 2."""
    with pytest.raises(ConfigError):
        take_over(parsed(**training), launch(*words))
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line


def test_ranks_that_would_not_meet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A launcher's two ranks, and a Trainer that saw one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError):
        take_over(parsed(), launch())
    assert "WORLD_SIZE: 2 ranks were started" in capsys.readouterr().err


def test_a_checkpoint_that_the_user_named_stays(tmp_path: Path) -> None:
    """What LLaMA-Factory chose by itself may be replaced by a whole one; tests/llama_factory/real has that."""
    made = parsed(resume_from_checkpoint="mine", output_dir=str(tmp_path))
    take_over(made, launch(resume_from_checkpoint="mine"))
    assert "mine" == made[2].resume_from_checkpoint


def chosen(rank: int, out: str) -> str | None:
    """Take over a run whose second rank looked for a checkpoint before it was there."""
    resume.damage = lambda folder: None
    made = parsed(resume_from_checkpoint=None if rank else f"{out}/checkpoint-2", output_dir=out, world_size=2)
    take_over(made, launch())
    path: str | None = made[2].resume_from_checkpoint
    return path


def test_all_ranks_go_on_from_one_checkpoint(tmp_path: Path) -> None:
    """LLaMA-Factory looks for it on each rank by itself; one that found none would begin anew, and wait for ever."""
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    assert [str(tmp_path / "checkpoint-2")] * 2 == run_ranks(2, chosen, str(tmp_path))


def test_its_refusals_are_problems(capsys: pytest.CaptureFixture[str]) -> None:
    """With the cause where that says more, on one line."""

    def read() -> None:
        try:
            raise FileNotFoundError("no folder\nm")
        except FileNotFoundError as error:
            raise OSError("Failed to load tokenizer.") from error

    with pytest.raises(ConfigError):
        told(read)()
    assert "error: LLaMA-Factory: Failed to load tokenizer. no folder m\n" == capsys.readouterr().err
    assert 3 == told(lambda value: value + 1)(2)


def test_a_quantised_model() -> None:
    """By its object, or by what its folder says."""
    model = tiny.model()
    assert quantised(model) is None
    assert quantised(None) is None
    model.config.quantization_config = {"quant_method": "gptq"}
    problem = quantised(model)
    assert problem is not None and "quantised models are not trained here" in problem.message


def test_options_of_accelerate_in_a_file_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """TrainingArguments has read it by then; no weight is read yet."""
    accelerate = SimpleNamespace(split_batches=True, even_batches=True)
    with pytest.raises(ConfigError):
        take_over(parsed(accelerator_config=accelerate), launch(accelerator_config="accelerate.json"))
    assert "error: accelerator_config: split_batches would divide" in capsys.readouterr().err


TERM = """
from torchturbo.plugins.contract import Plugin, register

@register()
class Term(Plugin):
    name = "term"

    def loss_term(self, outputs, batch, run): ...
"""


def test_plugins_package_and_arguments_together(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that takes seconds to find is told at once."""
    Path("term.py").write_text(TERM)
    Path("broken.py").write_text("import nowhere_to_be_found\n")
    config = build_from_args(
        parse_torchturbo_args(["--tt_plugin", "term.py", "--tt_plugin", "broken.py"])[0], environ={}
    )
    values = {"label_smoothing_factor": 0.1, "max_step": 3}
    said = {name: Said(value, name) for name, value in values.items()}

    def told() -> list[str]:
        with pytest.raises(ConfigError):
            run_command(Command(Arguments(said, values, []), config))
        return capsys.readouterr().err.splitlines()

    plugin, term, *unknown = told()
    assert "broken.py" in plugin and "nowhere_to_be_found" in plugin
    assert term.startswith("error: label_smoothing_factor: plugin term: its loss takes no loss term")
    assert 2 == sum("LLaMA-Factory has no such argument" in line for line in unknown) == len(unknown)

    (factory / "train" / "tuner.py").write_text("raise ImportError('too old')\n")
    for name in [name for name in sys.modules if name.startswith("llamafactory")]:
        del sys.modules[name]
    assert [plugin, term] == told()[:2]
    assert "too old" in told()[2]


def asked_about_experts(rank: int) -> list[str]:
    """Return what the model's check says of dividing the experts of a model that has none."""
    from torchturbo.adapters.llama_factory import run

    run._empty_model = lambda model_args: tiny.model("llama")  # this process is the test's own
    try:
        run._check_model(SimpleNamespace(), None, launch("--tt_ep_size", "2"))
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    return []


def test_what_depends_on_the_ranks_is_refused_before_weights() -> None:
    """The check knows how many there are."""
    for (message,) in run_ranks(2, asked_about_experts):
        assert "has no experts to divide" in message


# ---- diffusion models ----


def diffusion_model(folder: Path, **tokens: int) -> dict[str, Any]:
    """Return the arguments by which a diffusion model is found: its configuration alone."""
    tiny.model("qwen3", is_diffusion_model=True, **tokens).config.save_pretrained(folder)
    return model_of(str(folder))


def test_the_cut_off_length_of_a_diffusion_model_is_whole_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounded up, before LLaMA-Factory reads its data; a resumed run compares the rounded one."""
    made, one = parsed(), launch("--tt_bd_block_size", "48", cutoff_len=64)
    vars(made[0]).update(diffusion_model(tmp_path))

    take_over(made, one)

    assert 96 == made[1].cutoff_len
    assert 96 == one.facts["cutoff_len"]
    assert "cutoff_len 64 (cutoff_len) is rounded up to 96: whole blocks of 48 tokens" in capsys.readouterr().err


def test_a_packed_rows_length_keeps_what_llama_factory_holds_back(tmp_path: Path) -> None:
    """It takes one token off when it reads its arguments, and adds one to each row."""
    made = parsed()
    vars(made[0]).update(diffusion_model(tmp_path))
    made[1].cutoff_len = 63

    take_over(made, launch("--tt_bd_block_size", "48", cutoff_len=64))

    assert 95 == made[1].cutoff_len


def test_another_models_cut_off_length_stays(tmp_path: Path) -> None:
    """The block is none of its affairs."""
    made = parsed()
    tiny.model("qwen3").config.save_pretrained(tmp_path)
    vars(made[0]).update(model_of(str(tmp_path)))

    take_over(made, launch("--tt_bd_block_size", "48"))

    assert 64 == made[1].cutoff_len


def test_a_diffusion_model_is_looked_at_before_its_weights(tmp_path: Path) -> None:
    """FlashAttention by LLaMA-Factory's word for it, a tokenizer without a mask, another loss: all at once."""
    from torchturbo.adapters.llama_factory import run

    arguments = SimpleNamespace(**diffusion_model(tmp_path) | {"flash_attn": "fa2"})
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "gptq"},', 1))
    said: dict[str, Any] = {"flash_attn": "fa2", "label_smoothing_factor": 0.1, "compute_accuracy": True}
    with pytest.raises(ConfigError) as caught:
        run._check_model(arguments, tiny.tokenizer(), launch(**said))

    told = [str(problem) for problem in caught.value.problems]
    parts = (
        "mask_token_id",
        "flash_attn: FlashAttention can't express",
        "compute_accuracy: it compares predictions with the next token",
        "label_smoothing_factor: a loss that is made",
        "the model is quantised",
    )
    assert [part in line for part, line in zip(parts, told, strict=True)] == [True] * 5


def test_accuracy_is_a_next_token_models_too() -> None:
    """Where it is off, and for other models, nothing is said."""
    assert [] == accuracy_problems({"compute_accuracy": Said(False, "here")})
    assert [] == accuracy_problems({})


def test_a_block_longer_than_samples_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With both lengths."""
    made = parsed()
    vars(made[0]).update(diffusion_model(tmp_path))
    take_over(made, launch("--tt_bd_block_size", "4096", cutoff_len=64))
    told = capsys.readouterr().err
    assert "blocks of 4096 tokens are longer than the longest sample (cutoff_len 64)" in told


def test_a_class_alone_makes_a_diffusion_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration says nothing: the model on the meta device is asked, before data are cut and after."""
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "is_diffusion_model", True, raising=False)
    for said, expected in ((None, 96), (False, 64)):
        made = parsed()
        config = tiny.model("qwen3").config
        if said is not None:
            config.is_diffusion_model = said
        config.save_pretrained(tmp_path)
        vars(made[0]).update(model_of(str(tmp_path)))
        take_over(made, launch("--tt_bd_block_size", "48", cutoff_len=64))
        assert expected == made[1].cutoff_len


def greedy(lengths: list[int], capacity: int) -> list[list[int]]:
    """Choose as LLaMA-Factory does: the longest that fits, again and again."""
    left, rows = sorted(lengths), []
    while left:
        row: list[int] = []
        while fitting := [length for length in left if length <= capacity - sum(row)]:
            left.remove(fitting[-1])
            row.append(fitting[-1])
        rows.append(row)
    return rows


@pytest.mark.parametrize("capacity", [2047, 2048])
def test_packed_rows_have_room_for_whole_blocks(capacity: int) -> None:
    """62 documents of 33 tokens fit into 2,048 by their own lengths, and take 3,968 in blocks of 32."""
    lengths = [33] * 62 + [64, 1, 40]
    rows = in_whole_blocks(greedy, lambda: 32)(list(lengths), capacity)
    assert sorted(lengths) == sorted(length for row in rows for length in row)
    assert all(sum(-(-length // 32) * 32 for length in row) <= 2048 for row in rows)
    assert greedy(lengths, capacity) == in_whole_blocks(greedy, lambda: 1)(list(lengths), capacity)


def test_it_chooses_the_samples_of_packed_rows_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of LLaMA-Factory's function, which is there again afterwards."""
    packing = ModuleType(run_module.PACKING)
    packing.greedy_knapsack = greedy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, run_module.PACKING, packing)
    workflow = SimpleNamespace(load_model=print, CustomTrainer=object, CustomSeq2SeqTrainer=object)
    package: Any = SimpleNamespace(
        tuner=SimpleNamespace(get_train_args=print), workflows={"pt": workflow, "sft": workflow}
    )
    one = launch()
    with run_module.engine_underneath(package, one):
        one.grain = 32
        assert [[33], [33]] == packing.greedy_knapsack([33, 33], 96)
    assert greedy is packing.greedy_knapsack
