"""The engine under Trainer: one owner of everything, for any subclass, and nothing ignored in silence."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import mtp_models
import pytest
import tiny
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from torchturbo.adapters import base
from torchturbo.adapters.hf_arguments import framework_values, said_values
from torchturbo.adapters.hf_checkpoints import CheckpointMixin
from torchturbo.adapters.hf_places import PlacesMixin
from torchturbo.adapters.hf_trainer import TurboMixin, TurboTrainer, turbo
from torchturbo.engine.args import parse_torchturbo_args, set_torchturbo_args
from torchturbo.engine.config import Layer, build_from_args
from torchturbo.errors import ConfigError
from torchturbo.train.batches import Collator
from torchturbo.train.examples import Examples


@pytest.fixture(autouse=True)
def _no_arguments_of_the_process() -> Any:
    set_torchturbo_args(None)
    yield
    set_torchturbo_args(None)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "use_cpu": True, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **(settings | changes))


def rows(count: int = 8) -> Examples:
    ids = torch.randint(3, 320, (count, 10), generator=torch.Generator().manual_seed(1)).tolist()
    return Examples([{"input_ids": row, "labels": row} for row in ids])


def words(*line: str) -> None:
    set_torchturbo_args(parse_torchturbo_args(line)[0])


def trainer(folder: Path, kind: Any = TurboTrainer, changes: dict[str, Any] | None = None, **given: Any) -> Any:
    settings: dict[str, Any] = {
        "model": tiny.model(), "args": arguments(folder, **(changes or {})), "train_dataset": rows(),
        "data_collator": Collator(0),
    }  # fmt: skip
    return kind(**(settings | given))


# ---- what the user told the framework ----


def test_bf16_is_taken_over_and_the_users_arguments_stay(tmp_path: Path) -> None:
    """The engine autocasts, accelerate does not, and a second trainer finds the same arguments."""
    args = arguments(tmp_path, bf16=True)
    formats: set[torch.dtype] = set()
    for _ in range(2):
        model = tiny.model()
        model.model.layers[0].mlp.up_proj.register_forward_hook(
            lambda module, inputs, output: formats.add(output.dtype)
        )
        made = trainer(tmp_path, model=model, args=args, eval_dataset=rows(2))

        assert made.turbo.config.mixed_precision == "bf16"
        assert made.turbo.config.origin("mixed_precision") == (Layer.FRAMEWORK, "TrainingArguments.bf16")
        assert (made.args.bf16, made.args.mixed_precision) == (False, "no")
        assert made.accelerator.mixed_precision == "no"
        made.train()
        made.evaluate()
    assert formats == {torch.bfloat16}  # in training and evaluation alike
    assert (args.bf16, args.mixed_precision) == (True, "bf16")


def test_gradient_checkpointing_is_taken_over(tmp_path: Path) -> None:
    """With its kwargs; Trainer itself no longer switches anything."""
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    made = trainer(tmp_path, changes=changes)

    assert made.turbo.config.activation_checkpointing.use_reentrant
    assert made.turbo.config.origin("activation_checkpointing.enabled").layer is Layer.FRAMEWORK
    assert not made.args.gradient_checkpointing
    function = made.model.model.layers[0]._gradient_checkpointing_func
    assert function.args[1].keywords == {"use_reentrant": True}  # under what lets the layers' inputs require grad


def test_a_layer_of_ours_beats_the_framework_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """Both places are in the line."""
    monkeypatch.setenv("TORCH_TURBO_MIXED_PRECISION", "fp32")

    made = trainer(tmp_path, changes={"bf16": True})

    assert made.turbo.config.mixed_precision == "fp32"
    (line,) = [line for line in logged if "TrainingArguments.bf16" in line]
    assert "TORCH_TURBO_MIXED_PRECISION" in line


def test_full_determinism_is_taken_over(tmp_path: Path) -> None:
    """What is recorded is what holds; Trainer's own switch is off."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        made = trainer(tmp_path, changes={"full_determinism": True})
        assert made.turbo.config.use_deterministic_algorithms
        assert made.turbo.config.origin("use_deterministic_algorithms").place == "TrainingArguments.full_determinism"
        assert made.args.full_determinism is False
    finally:
        torch.use_deterministic_algorithms(deterministic)


def test_defaults_say_nothing(tmp_path: Path) -> None:
    """TrainingArguments' own defaults are no layer."""
    assert framework_values(said_values(TrainingArguments(str(tmp_path), use_cpu=True))) == []


def test_gbs_sets_the_accumulation_and_reports_the_users(tmp_path: Path, logged: list[str]) -> None:
    """The optimizer steps after gbs micro-batches, whatever the framework was told."""
    steps: list[str] = []

    class Count(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append("micro-batch")

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append("step")

    words("--tt_gbs", "3")
    trainer(tmp_path, changes={"gradient_accumulation_steps": 4, "max_steps": 1}, callbacks=[Count()]).train()

    assert steps == ["micro-batch", "micro-batch", "step"]
    (line,) = [line for line in logged if "gives way" in line]
    assert line == "TrainingArguments.gradient_accumulation_steps 4 gives way to gbs 3 (--tt_gbs): 3 accumulation steps"


def test_the_frameworks_accumulation_holds_without_gbs(tmp_path: Path) -> None:
    """null keeps it."""
    assert trainer(tmp_path, changes={"gradient_accumulation_steps": 4}).args.gradient_accumulation_steps == 4


def test_the_start_says_what_is_in_force(tmp_path: Path, logged: list[str]) -> None:
    """Settings with their places, the batch, the backend."""
    words("--tt_gbs", "2", "--tt_log_level", "INFO")
    trainer(tmp_path)

    assert "gbs = 2  (--tt_gbs)" in logged
    assert "batch: micro-batch 2 x accumulation 2 x data-parallel ranks 1 = 4 sequences per step" in logged
    assert any(line.startswith("backend fsdp2") for line in logged)


def test_the_log_level_is_set(tmp_path: Path, logged: list[str]) -> None:
    """At ERROR the start is silent."""
    words("--tt_log_level", "ERROR", "--tt_gbs", "2")
    trainer(tmp_path)

    assert logged == []


def test_shuffling_follows_the_seed_not_the_rank(tmp_path: Path) -> None:
    """accelerate would shuffle by each rank's torch seed."""
    assert trainer(tmp_path, changes={"seed": 7}).args.data_seed == 7
    assert trainer(tmp_path, changes={"seed": 7, "data_seed": 3}).args.data_seed == 3


# ---- second owners ----


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"bf16_full_eval": True}, "TrainingArguments.bf16_full_eval"),
        ({"fp16_full_eval": True}, "TrainingArguments.fp16_full_eval"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}, "_checkpointing_kwargs"),
        ({"average_tokens_across_devices": False}, "TrainingArguments.average_tokens_across_devices"),
        ({"accelerator_config": {"split_batches": True}}, "TrainingArguments.accelerator_config"),
        ({"accelerator_config": {"even_batches": False}}, "TrainingArguments.accelerator_config"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, "accelerator_config"),
    ],
)
def test_a_second_owner_is_refused(
    changes: dict[str, Any], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By place, with the reason and what to do."""
    with pytest.raises(ConfigError):
        trainer(tmp_path, changes=changes)

    (line,) = capsys.readouterr().err.splitlines()
    assert place in line
    assert ";" in line  # a remedy


@pytest.mark.parametrize("name", ["fp16", "deepspeed", "fsdp", "parallelism_config"])
def test_so_are_those_that_need_other_machines(name: str) -> None:
    """Their values can't be made here, but what is said about them can."""
    from torchturbo.adapters.hf_arguments import clashes

    (problem,) = clashes({name: True})

    assert problem.place == f"TrainingArguments.{name}"
    assert problem.remedy


@pytest.mark.parametrize(
    ("name", "bad", "harmless"),
    [
        ("ACCELERATE_USE_FSDP", "true", "false"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "false"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "false"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "no"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "32", "1"),
    ],
)
def test_what_accelerate_launch_leaves_in_the_environment(name: str, bad: str, harmless: str) -> None:
    """`accelerate launch` without options sets the harmless values."""
    from torchturbo.adapters.base import environment_clashes

    (problem,) = environment_clashes({name: bad})

    assert (problem.place, bool(problem.remedy)) == (name, True)
    assert environment_clashes({name: harmless}) == []
    assert environment_clashes({}) == []


def test_what_several_places_say_wrong_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of several places, a line each."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    words("--tt_bd_mask_low", "0.9", "--tt_bd_mask_high", "0.1")
    args = arguments(tmp_path)
    args.bf16_full_eval = True

    with pytest.raises(ConfigError):
        trainer(tmp_path, args=args)

    lines = capsys.readouterr().err
    for part in (
        "ACCELERATE_USE_FSDP",
        "diffusion.bd_mask_low",
        "bf16_full_eval",
    ):
        assert part in lines


def test_a_device_without_a_runtime_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Autocast would be for another device, without a word."""
    args = arguments(tmp_path)
    monkeypatch.setattr(TrainingArguments, "device", property(lambda self: torch.device("mps")))

    with pytest.raises(ConfigError):
        trainer(tmp_path, args=args)

    assert "TorchTurbo has no runtime for mps devices; use --use_cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("started", "world_size", "refused"), [("2", 1, True), ("2", 2, False), ("1", 1, False), ("", 1, False)]
)
def test_ranks_that_would_each_train_for_themselves_are_refused(
    started: str, world_size: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers starts CPU ranks so unless it is told of the CPU; both would write to one folder."""
    problem = base.launch_problem(world_size, {"WORLD_SIZE": started})
    assert refused == (problem is not None and "--use_cpu" in problem.remedy)
    if refused:
        monkeypatch.setattr(base, "launch_problem", lambda world_size: problem)
        with pytest.raises(ConfigError):
            trainer(tmp_path)


def test_one_process_uses_one_device(tmp_path: Path, logged: list[str]) -> None:
    """DataParallel would copy the model behind the engine's back."""
    args = arguments(tmp_path)
    args._n_gpu = 4
    made = trainer(tmp_path, args=args)

    assert made.args.n_gpu == 1
    assert made._train_batch_size == 2
    assert any("torchrun --nproc_per_node 4" in line for line in logged)


# ---- any subclass ----


def test_a_subclass_with_its_own_constructor(tmp_path: Path) -> None:
    """The engine starts inside Trainer's constructor, so arguments may come in any form."""

    class Mine(Trainer):  # type: ignore[misc]
        def __init__(self, words: str, *args: Any, **kwargs: Any) -> None:
            self.words = words
            super().__init__(*args, **kwargs)

    made = turbo(Mine)("hello", tiny.model(), arguments(tmp_path), Collator(0), rows())

    assert (made.words, type(made).__name__, turbo(Mine)) == ("hello", "TurboMine", type(made))
    assert made.model.model.layers[0].gradient_checkpointing
    made.train()


def test_a_configuration_given_as_an_object(tmp_path: Path) -> None:
    """It replaces the process-wide arguments."""
    words("--tt_gbs", "8")

    made = trainer(tmp_path, turbo_config=build_from_args(parse_torchturbo_args(["--tt_gbs", "2"])[0]))

    assert made.args.gradient_accumulation_steps == 2


def test_a_given_configuration_is_held_against_the_frameworks(
    tmp_path: Path, logged: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the framework was told gives way with a word; second owners are refused as ever."""
    trainer(tmp_path, changes={"bf16": True}, turbo_config=build_from_args(parse_torchturbo_args([])[0]))
    assert "TrainingArguments.bf16 gives way to the configuration given in code: mixed_precision = null" in logged

    config = build_from_args(parse_torchturbo_args([])[0])
    with pytest.raises(ConfigError):
        trainer(tmp_path, changes={"bf16_full_eval": True}, turbo_config=config)
    assert "bf16_full_eval" in capsys.readouterr().err


def test_models_from_a_function(tmp_path: Path) -> None:
    """Each model that is made is prepared."""
    made = trainer(tmp_path, model=None, model_init=lambda: tiny.model().to(torch.bfloat16))
    made.train()

    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.float32}
    assert made.model.model.layers[0].gradient_checkpointing


def test_an_own_compute_loss_gets_normalised_losses(tmp_path: Path) -> None:
    """The common override that drops the item count would otherwise weigh each micro-batch alike."""

    class Mine(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            output = model(**inputs)
            return (output.loss, output) if return_outputs else output.loss

    ragged = Examples(
        [{"input_ids": list(range(3, 13)), "labels": [-100] * at + list(range(3 + at, 13))} for at in range(8)]
    )
    losses = []
    for kind in (Trainer, Mine):
        words("--tt_gbs", "4")
        made = trainer(tmp_path, turbo(kind), {"max_steps": 1}, train_dataset=ragged)
        made.train()
        losses.append(made.state.log_history[0]["loss"])

    assert losses[0] == losses[1]


def test_an_own_loss_function_keeps_the_trainers_path(tmp_path: Path) -> None:
    """compute_loss_func and label smoothing scale by themselves; equal to plain Trainer."""

    def loss_function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    for changes, given in (({}, {"compute_loss_func": loss_function}), ({"label_smoothing_factor": 0.1}, {})):
        histories = []
        for kind in (Trainer, TurboTrainer):
            words("--tt_gbs", "2")
            made = trainer(tmp_path, kind, {"gradient_accumulation_steps": 2, "data_seed": 42} | changes, **given)
            made.train()
            histories.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
        assert histories[0] == pytest.approx(histories[1], rel=1e-6)
        assert made.turbo.context.normaliser is None


@pytest.mark.parametrize(
    "words_of_a_term", [["--tt_enable_mtp"], ["--tt_moe_aux_loss_coeff", "0.1"], ["--tt_moe_z_loss_coeff", "0.1"]]
)
def test_a_loss_outside_the_model_takes_no_objective(words_of_a_term: list[str], tmp_path: Path) -> None:
    """Both places are told, where it would be left out in silence."""
    words(*words_of_a_term)
    for changes, given in (({}, {"compute_loss_func": len}), ({"label_smoothing_factor": 0.1}, {})):
        with pytest.raises(ConfigError, match=f"takes no loss term, and {words_of_a_term[0]} asks for one"):
            trainer(tmp_path, changes=changes, model=mtp_models.model("glm4_moe"), **given)


def test_evaluation_is_the_mean_over_tokens(tmp_path: Path) -> None:
    """What the plain model says of the same rows."""
    model, batch = tiny.model(), Collator(0)(list(rows(4)))

    evaluated = trainer(tmp_path, changes={"per_device_eval_batch_size": 4}, eval_dataset=rows(4)).evaluate()

    assert evaluated["eval_loss"] == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)


class EvaluateInside(TrainerCallback):  # type: ignore[misc]
    """Evaluates between the micro-batches of a step."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer.evaluate()


def test_an_evaluation_inside_a_step_leaves_its_loss_alone(tmp_path: Path) -> None:
    """The tokens of the evaluation are not those of the step."""
    histories = []
    for inside in (False, True):
        callback = EvaluateInside()
        changes = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 1}
        made = trainer(tmp_path, changes=changes, eval_dataset=rows(3), callbacks=[callback])
        callback.trainer = made if inside else None
        made.train()
        histories.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert histories[0] == histories[1]


def test_a_checkpoint_without_its_optimizer_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainer would go on with a fresh optimizer and schedule without a word."""
    trainer(tmp_path, changes={"save_strategy": "steps", "save_steps": 1, "save_only_model": True}).train()
    made = trainer(tmp_path)

    for wanted in (True, str(tmp_path / "checkpoint-1")):
        with pytest.raises(ConfigError):
            made.train(resume_from_checkpoint=wanted)

    lines = capsys.readouterr().err
    assert "no complete checkpoint" in lines
    assert "holds the model alone" in lines


@pytest.mark.parametrize(
    ("name", "value", "option", "expected"),
    [
        ("weight_decay", 0.1, "weight_decay", [0.1, 0.0]),
        ("adam_beta1", 0.5, "betas", [(0.5, 0.999)] * 2),
        ("adam_beta2", 0.5, "betas", [(0.9, 0.5)] * 2),
        ("adam_epsilon", 1e-3, "eps", [1e-3] * 2),
    ],
)
def test_an_allowed_optimizer_setting_holds(
    name: str, value: float, option: str, expected: list[Any], tmp_path: Path
) -> None:
    """The loaded state brings the old value back; the one that was allowed is put in its place."""
    saving = {"save_strategy": "steps", "save_steps": 1, "weight_decay": 0.01}
    trainer(tmp_path, changes=saving | {"max_steps": 1}).train()
    words("--tt_resume_allow", name, "--tt_resume_allow", "max_steps")
    made = trainer(tmp_path, changes=saving | {name: value})

    made.train(resume_from_checkpoint=True)

    assert [group[option] for group in made.optimizer.param_groups] == expected


def test_another_optimizer_cannot_go_on(tmp_path: Path) -> None:
    """Its state is of another kind, so that there is nothing to allow."""
    trainer(tmp_path, changes={"save_strategy": "steps", "save_steps": 1}).train()
    words("--tt_resume_allow", "optim")
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, changes={"optim": "sgd"}).train(resume_from_checkpoint=True)

    (problem,) = caught.value.problems
    assert ("optim", "use the old value") == (problem.key, problem.remedy)


# ---- what the adapter leans on ----


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("create_accelerator_and_postprocess", ["self"]),
        ("call_model_init", ["self", "trial"]),
        ("_get_num_items_in_batch", ["self", "batch_samples", "device"]),
        ("compute_loss_context_manager", ["self"]),
        ("_get_output_dir", ["self", "trial"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("create_optimizer", ["self", "model"]),
        ("get_batch_samples", ["self", "epoch_iterator", "num_batches", "device"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        ("_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        ("_load_rng_state", ["self", "checkpoint"]),
        ("_issue_warnings_after_load", ["self", "load_result"]),
        ("log", ["self", "logs", "start_time"]),
        ("prediction_step", ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"]),
        (
            "evaluation_loop",
            ["self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
        ),
    ],
)
def test_trainers_methods_have_the_signatures_we_override(name: str, parameters: list[str]) -> None:
    """A release of transformers that moves one fails here, not in a run."""
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == parameters


def test_trainers_constructor_derives_nothing_before_the_accelerator() -> None:
    """The engine takes over there; accumulation and precision must not have been read."""
    source = inspect.getsource(Trainer.__init__)
    before = source[: source.index("self.create_accelerator_and_postprocess()")]

    assert "self.args = args" in before
    assert "self.model = model" in before
    for name in ("gradient_accumulation_steps", "bf16", "checkpointing", "self.accelerator ="):
        assert name not in before


REPLACED = {"_save_checkpoint", "_save_optimizer_and_scheduler"}
"""Methods of Trainer's that are taken on purpose: the first hands on to it elsewhere, the second pickles no optimizer."""


def test_no_name_of_trainers_is_taken_by_accident() -> None:
    """A private helper that Trainer happens to have too would replace it without a word."""
    own = {name: value for kind in (TurboMixin, PlacesMixin, CheckpointMixin) for name, value in vars(kind).items()}
    shared = {name: value for name, value in own.items() if callable(value) and hasattr(Trainer, name)}

    assert shared
    for name, value in shared.items():
        if name not in REPLACED and (not name.startswith("__") or name == "__init__"):
            assert re.search(rf"super\(\)\.{name}\b", inspect.getsource(value)), name
