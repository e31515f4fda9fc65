"""The installed LLaMA-Factory: absent, broken, of another version, changed; each is one line with a way out."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from torchturbo.adapters.llama_factory.known import problems_with
from torchturbo.adapters.llama_factory.package import TRAINERS, import_package, missing_package
from torchturbo.adapters.llama_factory.said import read_arguments
from torchturbo.errors import ConfigError, Problem


def refused() -> Problem:
    with pytest.raises(ConfigError) as caught:
        import_package()
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def _no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchturbo.adapters.llama_factory.package.MEDIA", ())


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pip command with the installed torch in it, or pip replaces it."""
    monkeypatch.setattr("torchturbo.adapters.llama_factory.package._is_there", lambda name: False)
    problem = missing_package()
    assert problem is not None
    assert "LLaMA-Factory is not installed" == problem.message
    version = metadata.version("torch").partition("+")[0]
    assert problem.remedy.startswith(f"pip install 'torch=={version}' llamafactory==0.9.5; ")
    assert "pip uninstall -y torchvision torchaudio" in problem.remedy


def test_what_is_used_of_it(factory: Path) -> None:
    """Its tuner, the module of each stage, its dataclasses."""
    assert missing_package() is None
    package = import_package()
    assert ["pt", "sft"] == sorted(package.workflows)
    assert all(hasattr(package.workflows[stage], name) for stage, (_, name) in TRAINERS.items())
    assert "FinetuningArguments" in [kind.__name__ for kind in package.arguments]


def test_torchaudio_may_be_absent(factory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-Factory imports it at once and needs it for sound alone; nobody else finds the stand-in."""
    monkeypatch.setattr("torchturbo.adapters.llama_factory.package._is_there", lambda name: False)
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    tuner = import_package().tuner

    assert "torchaudio" not in sys.modules
    with pytest.raises(ImportError, match="torchaudio is not installed, and sound can't be read"):
        tuner.torchaudio.load("a.wav")
    assert not hasattr(tuner.torchaudio, "__version__")


@pytest.mark.parametrize("name", ["torchvision", "torchaudio"])
def test_a_library_that_was_built_for_another_torch(name: str, factory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual trap of a torch for CPUs."""
    (factory.parent / f"{name}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.delitem(sys.modules, name, raising=False)

    problem = refused()
    assert (name, "operator torchvision::nms does not exist") == (problem.place, problem.message.rpartition(": ")[2])
    assert "pip uninstall -y torchvision torchaudio" in problem.remedy


def test_versions_that_it_refuses(factory: Path) -> None:
    """In its own words, the remedy included."""
    text = "transformers>=4.55.0,<=5.6.0 is required for a normal functioning of this module, but found 5.24.0."
    remedy = (
        "To fix: run `pip install transformers>=4.55.0,<=5.6.0` or set `DISABLE_VERSION_CHECK=1` to skip this check."
    )
    (factory / "hparams" / "parser.py").write_text(f"raise ImportError({text!r} + '\\n' + {remedy!r})\n")

    problem = refused()
    assert f"{text.rstrip('.')}" == problem.message
    assert problem.remedy.startswith("run `pip install transformers") and "DISABLE_VERSION_CHECK=1" in problem.remedy


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train/tuner.py", "get_train_args"),
        ("train/tuner.py", "run_exp"),
        ("train/sft/workflow.py", "CustomSeq2SeqTrainer"),
        ("train/pt/workflow.py", "load_model"),
        ("hparams/parser.py", "_TRAIN_ARGS"),
    ],
)
def test_names_that_are_gone(file: str, name: str, factory: Path) -> None:
    """Each by its whole name."""
    path = factory / file
    path.write_text(path.read_text().replace(name, "another"))

    problem = refused()
    module = f"llamafactory.{file.removesuffix('.py').replace('/', '.')}"
    assert f"this version has no {module}.{name}" == problem.message
    assert "llamafactory==0.9.5" in problem.remedy


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["max_step=3"], ["max_step=3: LLaMA-Factory has no such argument; did you mean max_steps?"]),
        (["evaluation_strategy=no"], ["evaluation_strategy=no: LLaMA-Factory has no such argument; it is eval_st"]),
        (['bf16="False"'], ['bf16="False": expected true or false, got string "False"; write it without quotes']),
        (["learning_rate='1e-4'"], ["learning_rate='1e-4': expected a number, got string \"1e-4\""]),
        (["quantization_bit='4'"], ["quantization_bit='4': expected a number"]),
        (["max_steps="], ["max_steps=: expected a value, got nothing; remove the key"]),
        (["quantization_bit=", "dataset=", "report_to=none", "output_dir=1", "learning_rate=1"], []),
        (["a=1", "bf16=x"], ["a=1: ", "bf16=x: "]),
    ],
)
def test_names_and_types(words: list[str], expected: list[str], factory: Path) -> None:
    """LLaMA-Factory says nothing of a type."""
    Path("t.yaml").write_text("do_train: true\n")
    problems = problems_with(read_arguments(["t.yaml", *words]), import_package().arguments)
    assert len(expected) == len(problems)
    for begins, problem in zip(expected, problems, strict=True):
        assert str(problem).startswith(begins)


@pytest.mark.parametrize(("name", "kind"), [("bf16", "true or false"), ("max_steps", "a number")])
def test_the_value_of_a_variable_is_not_told(
    name: str, kind: str, factory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable is text, and may be a secret."""
    monkeypatch.setenv("MY_SECRET", "s3cr3t")
    Path("t.yaml").write_text(f"{name}: ${{oc.env:MY_SECRET}}\n")
    (problem,) = problems_with(read_arguments(["t.yaml"]), import_package().arguments)
    assert f"expected {kind}, got its value" == problem.message
    assert "put ${oc.decode:...} around it" == problem.remedy


def test_flags_are_held_against_its_parser(factory: Path) -> None:
    """Whole names only, and no usage text of two hundred lines."""
    arguments = import_package().arguments

    def found(*words: str) -> list[str]:
        return [str(problem) for problem in problems_with(read_arguments(words), arguments)]

    assert ["--learning_r: LLaMA-Factory has no such argument; did you mean learning_rate?"] == found("--learning_r=1")
    assert ["--max_steps: invalid int value: 'many'"] == found("--max_steps", "many", "--do_train")
    assert [] == found("--do_train", "--max-steps", "3", "--bf16", "false")
