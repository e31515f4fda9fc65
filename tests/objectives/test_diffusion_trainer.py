"""Block diffusion under Trainer: any collator, evaluations, exact resumption, and what is refused there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusing
import pytest
import tiny
import torch
from ranks import run_ranks
from torch import nn
from transformers import (
    DataCollatorForSeq2Seq,
    FalconConfig,
    FalconForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from torchturbo.adapters.hf_trainer import TurboTrainer, turbo
from torchturbo.engine.args import parse_torchturbo_args
from torchturbo.engine.config import build_from_args
from torchturbo.errors import ConfigError
from torchturbo.objectives.diffusion.noise import DOUBLED
from torchturbo.plugins import Plugin, Run
from torchturbo.train.batches import Collator, pack
from torchturbo.train.examples import Examples

WORDS = ("--tt_bd_block_size", "4", "--tt_gradient_checkpointing", "false")


class Watcher(Plugin):
    """Keeps the micro-batches of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def step_begin(self, micro_batches: Any, run: Run) -> None:
        self.seen += micro_batches


def examples(count: int = 8, longest: int = 12) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, longest + 1, (count,), generator=generator).tolist()
    rows = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in rows]


def trainer(
    folder: Path, *words: str, model: Any = None, kind: Any = TurboTrainer, packed: bool = False, **changes: Any
) -> Any:
    """Return a trainer of a tiny diffusion model, and the plugin that watches it as ``watcher``."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "max_steps": 4, "logging_steps": 1,
        "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    given = {name: changes.pop(name) for name in ("compute_loss_func", "data_collator", "data") if name in changes}
    data = Examples(given.pop("data", None) or (pack(examples(), 16, 4) if packed else examples()))
    watcher = Watcher()
    made = kind(
        **{"data_collator": Collator(diffusing.FILL)} | given,
        model=diffusing.model() if model is None else model,
        args=TrainingArguments(str(folder), **(settings | changes)),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tiny.tokenizer(),
        turbo_config=build_from_args(parse_torchturbo_args([*WORDS, *words])[0], environ={}),
        turbo_plugins=[watcher],
    )
    made.watcher = watcher
    return made


def inputs(made: Any) -> list[list[Any]]:
    return [batch["input_ids"].tolist() for batch in made.watcher.seen]


def test_every_micro_batch_is_doubled_before_anything_looks_at_it(tmp_path: Path) -> None:
    """Plugins and counts see what the model computes; tokens are counted once."""
    made = trainer(tmp_path, gradient_accumulation_steps=2, include_num_input_tokens_seen="all", max_steps=2)
    made.train()
    seen = made.watcher.seen
    assert 4 == len(seen)
    assert all(batch["input_ids"].shape[1] == 2 * batch[DOUBLED].length for batch in seen)
    tokens = sum(batch["input_ids"].numel() // 2 for batch in seen)
    assert tokens == made.state.num_input_tokens_seen


def seq2seq() -> Any:
    return DataCollatorForSeq2Seq(tiny.tokenizer(), label_pad_token_id=-100, pad_to_multiple_of=8)


def test_the_collator_makes_no_difference(tmp_path: Path) -> None:
    """Transformers' own, which pads to other lengths: the same loss at every step."""
    losses = []
    for name, collator in (("own", Collator(diffusing.FILL)), ("theirs", seq2seq())):
        made = trainer(tmp_path / name, data_collator=collator)
        made.train()
        losses.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(set(losses[0])) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_has_the_noise_of_a_whole_one(workers: int, tmp_path: Path) -> None:
    """Bit for bit, also where loaders fetch ahead: the same batches, and the same weights at the end."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": workers}
    whole = trainer(tmp_path / "whole", **settings)
    whole.train()
    resumed = trainer(tmp_path / "whole", model=diffusing.model(seed=1), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))

    assert 4 == len(inputs(whole))
    assert inputs(whole)[2:] == inputs(resumed)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name


def test_noise_is_fresh_in_every_epoch_and_follows_the_seed(tmp_path: Path) -> None:
    """Two steps of one sample."""
    data = examples(1, 12)
    runs = []
    for name, seed in (("a", 42), ("b", 42), ("c", 43)):
        made = trainer(tmp_path / name, data=data, max_steps=2, seed=seed)
        made.train()
        runs.append(inputs(made))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_an_evaluation_is_the_same_each_time_whatever_its_batches(tmp_path: Path) -> None:
    """Its noise is fixed: before and after a step differ by the model alone."""
    losses = []
    for size in (3, 8):
        made = trainer(tmp_path / str(size), per_device_eval_batch_size=size, learning_rate=0.0, max_steps=1)
        losses.append(made.evaluate()["eval_loss"])
        made.train()
        losses.append(made.evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_predictions_are_those_of_the_noisy_half(tmp_path: Path) -> None:
    """Logits and labels are of one length, not shifted."""
    made = trainer(tmp_path)
    output = made.predict(Examples(examples(4)))
    assert output.predictions.shape[:2] == output.label_ids.shape
    assert (output.label_ids != -100).any()


class WithoutSelection(LlamaForCausalLM):  # type: ignore[misc]
    """A model whose forward makes the logits of all tokens."""

    def forward(  # type: ignore[override]
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        return super().forward(input_ids, attention_mask, position_ids, labels=labels, **kwargs)


def test_predictions_of_a_model_that_selects_no_logits(tmp_path: Path) -> None:
    """The noisy half's too, and equal to those of the model that does."""
    plain = diffusing.model("llama")
    plain.config.is_diffusion_model = True
    whole = WithoutSelection(plain.config)
    whole.load_state_dict(plain.state_dict())
    data = Examples(examples(4))
    expected = trainer(tmp_path / "a", model=plain).predict(data)
    found = trainer(tmp_path / "b", model=whole).predict(data)
    assert expected.predictions.shape == found.predictions.shape == (*found.label_ids.shape, 320)
    assert float(abs(expected.predictions - found.predictions).max()) < 1e-5


def predicted(rank: int, folder: str) -> Any:
    output = trainer(Path(folder), "--tt_sp_size", "2").predict(Examples(examples(4)))
    return output.predictions, output.label_ids


def test_two_ranks_that_share_sequences_predict_as_one(tmp_path: Path) -> None:
    """Their forward gives the logits of both halves."""
    one = trainer(tmp_path).predict(Examples(examples(4)))
    for predictions, labels in run_ranks(2, predicted, str(tmp_path)):
        assert one.predictions.shape == predictions.shape
        assert (one.label_ids == labels).all()
        assert float(abs(one.predictions - predictions).max()) < 1e-5


def test_packed_rows_are_trained_as_the_rows_they_hold(tmp_path: Path) -> None:
    """Their evaluation is that of the single rows, but for what a document's noise is drawn from: all is hidden here."""
    words = ("--tt_bd_mask_low", "1", "--tt_bd_mask_high", "1")
    apart = trainer(tmp_path / "a", *words).evaluate()["eval_loss"]
    together = trainer(tmp_path / "b", *words, packed=True).evaluate()["eval_loss"]
    assert apart == pytest.approx(together, rel=1e-6)


def losses(folder: Path, *words: str) -> list[float]:
    made = trainer(folder, "--tt_gbs", "4", "--tt_cap_lambda", "1", *words, max_steps=2)
    evaluated = made.evaluate()["eval_loss"]
    made.train()
    history = made.state.log_history
    return [evaluated, *(entry[name] for entry in history for name in ("loss", "cap_loss") if name in entry)]


def losses_of_rank(rank: int, folder: str) -> list[list[float]]:
    return [losses(Path(folder)), losses(Path(folder), "--tt_sp_size", "2")]


def test_two_ranks_train_and_evaluate_as_one(tmp_path: Path) -> None:
    """Two data-parallel ranks, and two that share sequences, draw what one process draws."""
    one = losses(tmp_path)
    assert 5 == len(one)
    for rank in run_ranks(2, losses_of_rank, str(tmp_path)):
        for found in rank:
            assert found == pytest.approx(one, rel=2e-5)


# ---- refused ----


def told(caught: Any) -> str:
    return "\n".join(map(str, caught.value.problems))


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.sum()


class OwnLoss(Trainer):  # type: ignore[misc]
    """Looks at logits and labels as a next-token model has them."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, **kwargs) * 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "smoothed": ({"label_smoothing_factor": 0.1}, "shifts its labels"),
    "loss function": ({"compute_loss_func": own_loss}, "shifts its labels"),
    "trainer": ({"kind": turbo(OwnLoss)}, "OwnLoss.compute_loss would see a doubled batch"),
    "no mask token": ({"model": None}, "names a mask token (mask_token_id); add mask_token_id"),
    "mask beyond": ({"model": 320}, "the mask token 320 is none of the model's 320 tokens"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_has_no_place_beside_it_is_refused(case: str, tmp_path: Path) -> None:
    """When the trainer is made, with the remedy."""
    changes, message = REFUSED[case]
    if "model" in changes:
        changes = {"model": diffusing.model(mask_token_id=changes["model"])}
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, **changes)
    assert message in told(caught)


class Deaf(nn.Module):
    """Stands around a model and hides its mask from it, or puts a causal one in its place."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        given = kwargs["attention_mask"]
        return args, {**kwargs, "attention_mask": self.mask(given)}


def none(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(mask)


def causal(mask: torch.Tensor) -> torch.Tensor:
    return mask + torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1).clamp(min=-1e9)


@pytest.mark.parametrize(
    ("mask", "message"),
    [(none, "lets tokens see what its mask hides"), (causal, "it puts a causal mask over the one it is given")],
    ids=["ignored", "causal"],
)
def test_a_model_that_does_not_keep_to_its_mask_is_refused_before_its_first_step(
    mask: Any, message: str, tmp_path: Path
) -> None:
    """Found by running it."""
    model = diffusing.model()
    model.model.register_forward_pre_hook(Deaf(mask).forward, with_kwargs=True)
    made = trainer(tmp_path, model=model)
    with pytest.raises(ConfigError) as caught:
        made.train()
    assert message in told(caught)
    assert 0 == made.state.global_step


def test_what_a_model_raises_at_its_mask_is_a_problem(tmp_path: Path) -> None:
    """Falcon with ALiBi counts the tokens of a mask [B, S], and knows no other; it is in training mode again."""
    config = FalconConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True, bos_token_id=None,
        is_diffusion_model=True, mask_token_id=diffusing.MASK, name_or_path="a/falcon",
    )  # fmt: skip
    made = trainer(tmp_path, model=FalconForCausalLM(config))
    made.model.train()
    with pytest.raises(ConfigError) as caught:
        made._probe()
    expected = "a/falcon: FalconForCausalLM can't be trained by block diffusion: it fails with its mask of two blocks"
    assert told(caught).startswith(expected)
    assert "ValueError" in told(caught)
    assert made.model.training


def test_a_model_that_wants_a_mask_for_each_row_gets_it(tmp_path: Path) -> None:
    """XGLM compares its mask's shape with its batch's."""
    made = trainer(tmp_path, model=diffusing.model("xglm"), data=[examples(1)[0]] * 4, max_steps=1)
    made.train()
    assert 1 == made.state.global_step


def faint(mask: torch.Tensor) -> torch.Tensor:
    """Return a causal mask that lets a trace through: less than rounding would explain."""
    return mask + torch.full_like(mask, -12.0).triu(1)


def test_what_moves_less_than_rounding_is_not_seen(tmp_path: Path) -> None:
    """A causal mask under which logits still differ in their last digits."""
    model = diffusing.model()
    model.model.register_forward_pre_hook(Deaf(faint).forward, with_kwargs=True)
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, model=model)._probe()
    assert "it puts a causal mask over" in told(caught)


def test_looking_at_a_model_leaves_it_as_it_was(tmp_path: Path) -> None:
    """In training mode, with its generator untouched."""
    made = trainer(tmp_path)
    made.model.train()
    before = torch.get_rng_state()
    made._probe()
    assert made.model.training
    assert torch.equal(before, torch.get_rng_state())
