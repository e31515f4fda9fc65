"""Several ranks: the figures of LLaMA-Factory alone, ours under torchrun, and by LLaMA-Factory's own variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ALONE = """
import sys
from torchturbo.adapters.llama_factory.package import import_package
import_package().tuner.run_exp(args={**__import__("yaml").safe_load(open(sys.argv[1])), "output_dir": sys.argv[2]})
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def python(*words: Any, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LLAMAFACTORY_VERBOSITY": "WARN", **environ}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=180)


def steps(output: Path) -> dict[int, tuple[float, float]]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return {
        entry["step"]: (round(entry["loss"], 5), round(entry["grad_norm"], 5)) for entry in history if "loss" in entry
    }


def test_two_ranks_train_as_llamafactory_alone_does(settings: Callable[..., Path], tmp_path: Path) -> None:
    """To five decimals; gbs 4 on two ranks is two steps of accumulation, and rows of unequal length."""
    path = settings(use_cpu=True)
    (tmp_path / "alone.py").write_text(ALONE)
    alone = python(*TORCHRUN, tmp_path / "alone.py", path, tmp_path / "alone")
    assert 0 == alone.returncode, alone.stderr[-3000:]

    ours = python(*TORCHRUN, "-m", "torchturbo", "llamafactory", path, "--tt_gbs", "4", "gradient_accumulation_steps=7")
    assert 0 == ours.returncode, ours.stderr[-3000:]

    assert steps(tmp_path / "alone") == steps(tmp_path / "out")
    assert "accumulation 2 x data-parallel ranks 2 = 8 sequences" in ours.stderr


def test_its_launchers_variables_start_torchrun_with_every_word_as_it_was(
    settings: Callable[..., Path], tmp_path: Path
) -> None:
    """LLaMA-Factory's own launcher splits words at blanks and wants torchrun on PATH; a bad batch is told once."""
    path = settings("my train.yaml", max_steps=1)
    environ = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "PATH": "/usr/bin:/bin"}
    done = python("-m", "torchturbo.adapters.llama_factory", path, "run_name=my run", "--tt_gbs", "3", **environ)

    assert 2 != done.returncode != 0  # torchrun's own status for a rank that ended with 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "--tt_gbs" in line
    (started,) = [line for line in done.stderr.splitlines() if "INFO starting" in line]
    assert started.endswith("torchturbo llamafactory (your words)")
