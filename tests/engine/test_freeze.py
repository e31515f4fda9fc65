"""The freeze policy on vision-language models with real images: what gets a gradient, alone and on two ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import tiny_vlm
import torch
from ranks import run_ranks

from torchturbo.checkpoint.record import write_record
from torchturbo.checkpoint.resume import resume_problems
from torchturbo.cli.main import main
from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import EngineConfig, build_from_args
from torchturbo.engine.engine import Context, Engine
from torchturbo.engine.parts import FAMILIES, GROUPS, partition
from torchturbo.engine.steps.freeze import apply, check, undo
from torchturbo.errors import Problem
from torchturbo.generated.keys import KEYS

FLAGS = {group: f"--tt_freeze_{group}" for group in GROUPS}
CHOICES = [chosen for count in range(3) for chosen in itertools.combinations(GROUPS, count)]
CHECKPOINTING = {
    "off": ["--tt_gradient_checkpointing", "false"],
    "on": [],
    "reentrant": ["--tt_ac_use_reentrant", "true"],
}


def config(*words: str) -> EngineConfig:
    return build_from_args(parse_torchturbo_args(words)[0])


def prepared(model: Any, *words: str) -> tuple[Any, Engine]:
    engine = Engine(config("--tt_mixed_precision", "fp32", *words), Context())
    assert [] == engine.problems(model)
    return engine.prepare(model).train(), engine


def gradients(kind: str, *words: str) -> dict[str, torch.Tensor]:
    """Return the gradients of one forward and backward pass, those that are there."""
    model, engine = prepared(tiny_vlm.model(kind), *words)
    with engine.autocast():
        model(**tiny_vlm.batch(kind)).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def names(kind: str, groups: set[str]) -> set[str]:
    """Return the parameters of groups, without those that the loss never reaches."""
    found = partition(tiny_vlm.model(kind), FAMILIES[kind]).groups
    inside = {name for group in groups for name in found[group]}
    return {name for name in inside if not name.startswith(tiny_vlm.UNUSED[kind])}


# ---- gradients ----


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, torch.Tensor]]:
    return {kind: gradients(kind, *CHECKPOINTING["off"]) for kind in tiny_vlm.UNUSED}


@pytest.mark.filterwarnings("error:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("frozen", CHOICES, ids="+".join)
@pytest.mark.parametrize("kind", tiny_vlm.UNUSED)
def test_exactly_what_is_not_frozen_gets_its_gradient(
    kind: str, frozen: tuple[str, ...], checkpointing: str, whole: dict[str, dict[str, torch.Tensor]]
) -> None:
    """The same gradient as without freezing; reentrant checkpointing drops none behind a frozen first part."""
    grads = gradients(kind, *CHECKPOINTING[checkpointing], *(FLAGS[group] for group in frozen))

    assert names(kind, set(GROUPS) - set(frozen)) == set(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, whole[kind][name], rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_a_frozen_tower_costs_no_backward_pass(kind: str, checkpointing: str) -> None:
    """Transformers lets every embedding's output require grad with checkpointing, the tower's among them."""
    model, engine = prepared(tiny_vlm.model(kind), *CHECKPOINTING[checkpointing], FLAGS["vision_tower"])
    tower = model.model.vision_tower if kind == "llava" else model.model.visual
    layers = tower.encoder.layers if kind == "llava" else tower.blocks
    seen = []
    layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))

    model(**tiny_vlm.batch(kind)).loss.backward()

    assert [False] == [output.requires_grad for output in seen]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", tiny_vlm.UNUSED)
def test_a_batch_without_images_can_be_trained_on(kind: str, checkpointing: str) -> None:
    """Behind a frozen language model its loss depends on nothing that is trained; it must not stop the run."""
    frozen = (FLAGS["vision_tower"], FLAGS["language_model"])
    model, engine = prepared(tiny_vlm.model(kind), *CHECKPOINTING[checkpointing], *frozen)

    model(**tiny_vlm.batch(kind, image=False)).loss.backward()

    assert 0 == sum(p.grad.norm() for p in model.parameters() if p.grad is not None)
    model.eval()
    assert not model(**tiny_vlm.batch(kind, image=False)).loss.requires_grad


# ---- adapters ----


ADAPTED = {"llava": r".*vision_tower.*\.q_proj", "qwen3_vl": r".*visual.*\.qkv"}


def adapted(targets: str, kind: str = "llava") -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_vlm.model(kind), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    for module in model.modules():
        if hasattr(module, "p") and isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_adapters_of_a_frozen_part_are_frozen_with_it(checkpointing: str, logged: list[str]) -> None:
    """`do not train the vision encoder` holds for what was put into it; the log says how much that is."""
    model, engine = prepared(adapted(r".*\.q_proj"), FLAGS["vision_tower"], *CHECKPOINTING[checkpointing])

    model(**tiny_vlm.batch()).loss.backward()

    grads = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert grads == {name for name, _ in model.named_parameters() if "lora_" in name and "language_model" in name}
    assert grads == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    (line,) = [line for line in logged if line.startswith("frozen: ")]
    assert "of them adapters')" in line


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_in_a_tower_get_their_gradients(kind: str, checkpointing: str) -> None:
    """PEFT freezes the first layer of the tower, behind which reentrant checkpointing records nothing by itself."""
    model, engine = prepared(adapted(ADAPTED[kind], kind), *CHECKPOINTING[checkpointing])

    model(**tiny_vlm.batch(kind)).loss.backward()

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and ".layers.2." not in name}
    assert len(trained) == 4
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in trained.values())


# ---- what the step does beside ----


def test_a_frozen_part_keeps_its_format_and_what_was_frozen_stays(logged: list[str]) -> None:
    """No fp32 copy of what is not trained; the log says what is."""
    model = tiny_vlm.model().to(torch.bfloat16)
    model.model.multi_modal_projector.linear_1.bias.requires_grad_(False)
    engine = Engine(config("--tt_mixed_precision", "bf16", FLAGS["vision_tower"]), Context())

    engine.prepare(model)

    assert {torch.bfloat16} == {p.dtype for p in model.model.vision_tower.parameters()}
    assert {torch.float32} == {p.dtype for p in model.model.language_model.parameters()}
    assert not model.model.multi_modal_projector.linear_1.bias.requires_grad
    vision = sum(p.numel() for p in model.model.vision_tower.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert f"frozen: vision_tower ({vision:,} parameters); trained: {trained:,} parameters" in logged


# ---- refusals ----


def refusals(model: Any, *words: str) -> list[Problem]:
    return check(model, config(*words), Context())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_part_that_is_not_there_is_an_error(device: str) -> None:
    """Each by its own option, before a weight is read."""
    with torch.device(device):
        model = tiny.model()

    found = refusals(model, FLAGS["vision_tower"], FLAGS["multi_modal_projector"])

    assert [
        (FLAGS[group], f"freeze_policy.{group}", "LlamaForCausalLM has no such part")
        for group in ("vision_tower", "multi_modal_projector")
    ] == [(problem.place, problem.key, problem.message) for problem in found]


def test_an_unknown_family_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    """And says how to add it."""
    model = tiny_vlm.model()
    model.config.model_type = "mine"

    (problem,) = refusals(model, FLAGS["language_model"])

    assert problem.key == "freeze_policy"
    assert problem.place == FLAGS["language_model"]
    assert "the parts of mine models are not known, only those of aya_vision, " in problem.message
    assert "torchturbo.engine.parts.register" in problem.remedy
    assert [] == refusals(model)


def test_a_parameter_outside_all_parts_is_an_error() -> None:
    """A changed model class must not be frozen by half."""
    model = tiny_vlm.model()
    model.extra = torch.nn.Linear(2, 2)

    (problem,) = refusals(model, FLAGS["language_model"])

    assert problem.message.endswith("in none of the three parts, or in two: extra.weight, extra.bias")
    assert [] == refusals(model)


@pytest.mark.parametrize(
    ("make", "frozen"),
    [
        (tiny_vlm.model, GROUPS),
        (tiny.model, ("language_model",)),
        (lambda: adapted(r".*vision_tower.*\.q_proj"), ("vision_tower",)),
    ],
    ids=["all", "text", "adapters"],
)
def test_nothing_left_to_train_is_an_error(make: Any, frozen: tuple[str, ...]) -> None:
    """With every option that took part in it."""
    (problem,) = refusals(make(), *(FLAGS[group] for group in frozen))

    assert problem.place == ", ".join(FLAGS[group] for group in frozen)
    assert problem.message.endswith("frozen, nothing is left to train")


def test_heads_that_come_later_are_left_to_train(logged: list[str]) -> None:
    """The frozen-target mode: a draft is trained against a language model that stays as it is."""
    model = tiny.model()
    assert [] == refusals(model, FLAGS["language_model"], str(KEYS["mtp.enabled"].cli))
    apply(model, config(FLAGS["language_model"], str(KEYS["mtp.enabled"].cli)), Context())
    (line,) = [line for line in logged if line.startswith("frozen: ")]
    assert line.endswith("parameters); trained: the extra heads")
    undo(model)

    model.mtp = torch.nn.Linear(2, 2)
    assert [] == refusals(model, FLAGS["language_model"])
    prepared(model, FLAGS["language_model"])
    assert {"mtp.weight", "mtp.bias"} == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_resume_with_another_policy_is_an_error_that_nothing_allows(tmp_path: Path) -> None:
    """The optimizer's state is that of the parameters that were trained."""
    write_record(tmp_path, config(FLAGS["vision_tower"]), {}, 1)
    key = "freeze_policy.vision_tower"

    problems, allowed = resume_problems(tmp_path, config("--tt_resume_allow", key), {}, "--tt_resume_allow")

    assert [key] == [problem.key for problem in problems]
    assert "was made with true, this run has false" in problems[0].message
    assert "--tt_resume_allow" not in problems[0].remedy
    assert [] == allowed


def test_train_refuses_before_a_weight_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And makes no output folder."""
    monkeypatch.delattr("torchturbo.train.run.load_model")
    folder = tiny.save(tmp_path / "model")
    data = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.rows(4))
    words = ["--model_name_or_path", str(folder), "--dataset", str(data), "--output_dir", str(tmp_path / "out")]
    before = sorted(tmp_path.iterdir())

    assert 2 == main(["train", *words, "--use_cpu", "true", FLAGS["vision_tower"]])

    assert f"{FLAGS['vision_tower']}: freeze_policy.vision_tower: LlamaForCausalLM has no" in capsys.readouterr().err
    assert before == sorted(tmp_path.iterdir())


# ---- training ----


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows with images, and, where wanted, every second one without."""

    def __init__(self, count: int, text_every: int = 0) -> None:
        self.rows = [tiny_vlm.batch(seed=at, image=not (text_every and at % text_every == 1)) for at in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self.rows[at]


def trainer(folder: Path, rows: Rows, *words: str) -> Any:
    from transformers import TrainingArguments

    from torchturbo.adapters.hf_trainer import TurboTrainer

    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    return TurboTrainer(
        model=tiny_vlm.model(),
        args=args,
        train_dataset=rows,
        data_collator=lambda batch: batch[0],
        turbo_config=config("--tt_mixed_precision", "fp32", *words),
    )


@pytest.mark.parametrize("frozen", CHOICES[1:], ids="+".join)
def test_a_frozen_part_does_not_move_and_has_no_optimizer_state(frozen: tuple[str, ...], tmp_path: Path) -> None:
    """Two steps of a real run: what is not frozen moves and has state, the rest neither."""
    run = trainer(tmp_path, Rows(4), *(FLAGS[group] for group in frozen))
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}

    run.train()

    wanted = names("llava", set(GROUPS) - set(frozen))
    after = dict(run.model.named_parameters())
    assert wanted == {name for name in after if not torch.equal(before[name], after[name])}
    state = {id(parameter) for parameter in run.optimizer.optimizer.state}
    assert {id(after[name]) for name in wanted} == state


def test_what_the_loss_does_not_reach_is_reported_once(tmp_path: Path, logged: list[str]) -> None:
    """LLaVA's last vision layer, by name."""
    trainer(tmp_path, Rows(4)).train()

    (line,) = [line for line in logged if "got no gradient" in line]
    trained = len(list(tiny_vlm.model().parameters()))
    assert line.startswith(f"18 of {trained} trained parameters got no gradient in the first step")
    assert "model.vision_tower.encoder.layers.2.self_attn.k_proj.weight" in line
    assert line.endswith("and 15 more")


def test_a_run_without_such_parameters_says_nothing(tmp_path: Path, logged: list[str]) -> None:
    """With the tower frozen, all that is trained is reached."""
    trainer(tmp_path, Rows(4), FLAGS["vision_tower"]).train()

    assert not any("got no gradient" in line for line in logged)


def rank_run(rank: int, folder: str, words: list[str]) -> dict[str, torch.Tensor]:
    """Train on images on one rank and on text on the other, in turn."""
    run = trainer(Path(folder), Rows(8, text_every=2), *words)
    before = {name: parity.whole(parameter) for name, parameter in run.model.named_parameters()}
    run.train()
    after = {name: parity.whole(parameter) for name, parameter in run.model.named_parameters()}
    return {name: weight for name, weight in after.items() if not torch.equal(before[name], weight)}


@pytest.mark.parametrize("frozen", CHOICES, ids="+".join)
def test_two_ranks_train_what_is_not_frozen(frozen: tuple[str, ...], tmp_path: Path) -> None:
    """A row without an image, and a layer that the loss never reaches, neither hang nor stop the run."""
    words = [FLAGS[group] for group in frozen]

    first, second = run_ranks(2, rank_run, str(tmp_path), words)

    assert names("llava", set(GROUPS) - set(frozen)) == set(first)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
