"""Trainers that do more about the loss than Trainer, where ranks share sequences: which are refused and which hand it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
from transformers import Trainer, TrainingArguments

from torchturbo.adapters.hf_data import own_losses, sequence_clashes
from torchturbo.adapters.hf_trainer import TurboTrainer, turbo
from torchturbo.errors import ConfigError


class HandsOn(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what Trainer computes, and say so."""
        return super().compute_loss(model, inputs, *args, **kwargs)


class Doubles(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2


class Scaled(HandsOn):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = dict(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


class Other(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {"labels": inputs["labels"]}, *args, **kwargs)


@pytest.mark.parametrize("kind", [Trainer, TurboTrainer, HandsOn, turbo(HandsOn)])
def test_a_loss_that_is_handed_on_is_trainers(kind: type) -> None:
    assert [] == own_losses(kind) == own_losses(None)


@pytest.mark.parametrize("kind", [Doubles, Scaled, Other])
def test_every_other_loss_is_the_classes_own(kind: type) -> None:
    """Whatever it does beside: what can't be read is not known to be harmless."""
    assert [kind] == own_losses(turbo(kind))


def test_a_method_without_a_source_is_not_known_to_be_harmless() -> None:
    space: dict[str, Any] = {"Trainer": Trainer}
    exec("class Made(Trainer):\n    def compute_loss(self, *a): return super().compute_loss(*a)", space)
    space["Made"].__module__ = "made"

    assert [space["Made"]] == own_losses(space["Made"])


def test_llama_factorys_trainer_hands_on() -> None:
    """Its other branch needs a compute_loss_func, which is refused by itself."""
    Theirs = type("CustomSeq2SeqTrainer", (Doubles,), {"compute_loss": Doubles.compute_loss})
    Theirs.__module__ = "llamafactory.train.sft.trainer"

    assert [Doubles] == own_losses(Theirs)


def trainer(folder: Path, kind: type, size: int) -> Any:
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", per_device_train_batch_size=1)
    return kind(model=tiny.model(), args=args, turbo_config=parity.config(parallel_plan={"sp_size": size}))


def test_the_start_tells_the_reason_and_the_remedy(tmp_path: Path) -> None:
    """Beside whatever else is wrong: here, one process that should be two."""
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, turbo(Doubles), 2)

    (found,) = [str(problem) for problem in caught.value.problems if "Doubles" in str(problem)]
    assert found.endswith(
        "parallel_plan.sp_size: Doubles.compute_loss would see logits of a part, and a loss that is this part's share; "
        "add to the loss by a plugin's loss_term, or use sp_size 1"
    )
    assert isinstance(trainer(tmp_path, turbo(Doubles), 1), Doubles)


def test_noise_by_the_length_of_sequences_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, neftune_noise_alpha=5.0)

    (found,) = map(str, sequence_clashes(parity.config(parallel_plan={"sp_size": 2}), args))

    assert "NEFTune scales its noise by the length of whole sequences" in found
    assert found.endswith("remove neftune_noise_alpha, or use sp_size 1")
    assert [] == sequence_clashes(parity.config(), args)
