"""Fuzz the configuration for some time: ``nox -s fuzz``, ``nox -s fuzz -- --seconds 60``.

The fuzzer runs in a process of its own, some minutes at a time; what ends one (an input that an oracle refuses, a hang,
too much memory) is kept under build/fuzz/found, and the next goes on. Exit status 1 if anything was found: put the file
into tests/fuzz/corpus, where every test run reads it, and mend what it shows.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import seeds

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SLICE = 300
"""Seconds of one process: what it learned is on the disk, and what it forgot to free is not."""
ENOUGH = 20
"""Findings after which a run ends early."""
LONGEST = 65_536
"""Bytes of an input."""
HANG = 20
"""Seconds of one input, all commands together, after which libFuzzer ends the process; the oracles' own limits are
shorter, but can't end a reading that does not return."""


def main() -> int:
    """Fuzz, and say what was found."""
    parser = argparse.ArgumentParser(description="Fuzz the configuration.")
    parser.add_argument("--seconds", type=int, default=600, help="default: 600")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="default: build/fuzz")
    options = parser.parse_args()
    grown, found, first = (options.folder / name for name in ("grown", "found", "seeds"))
    for folder in (grown, found, first):
        folder.mkdir(parents=True, exist_ok=True)
    for text in seeds.texts():
        (first / hashlib.sha1(text).hexdigest()).write_bytes(text)
    words = options.folder / "words.dict"
    words.write_text(seeds.dictionary(), encoding="ascii")
    known = set(found.iterdir())
    end = time.monotonic() + options.seconds
    while (left := int(end - time.monotonic())) > 0 and len(set(found.iterdir()) - known) < ENOUGH:
        status = _fuzz(min(left, SLICE), [grown, first], found, words)
        if status and not set(found.iterdir()) - known:
            print("the fuzzer itself failed", file=sys.stderr)
            return 2
    new = sorted(set(found.iterdir()) - known)
    for path in new:
        print(f"\nfound: {path}\n{replayed(path)}")
    print(f"{len(list(grown.iterdir()))} inputs reach further than the seeds; {len(new)} findings")
    return 1 if new else 0


def _fuzz(seconds: int, corpora: list[Path], found: Path, words: Path) -> int:
    arguments = [
        f"-max_total_time={seconds}", f"-artifact_prefix={found}{os.sep}", f"-dict={words}", f"-max_len={LONGEST}",
        f"-timeout={HANG}", "-rss_limit_mb=0", "-print_final_stats=1", "-verbosity=1", "-reload=0", "-report_slow_units=1000",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # where the oracles write their files
        done = subprocess.run(
            [sys.executable, str(HERE / "target.py"), *arguments, *(str(path.absolute()) for path in corpora)],
            cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    lines = done.stdout.splitlines()
    shown = lines[-40:] if done.returncode else [line for line in lines if line.startswith(("Done", "stat::number"))]
    print("\n".join(shown), flush=True)
    return done.returncode


def replayed(path: Path) -> str:
    """Return the last lines of what an input raises, in a process without the fuzzer."""
    script = "import sys, oracles; data = open(sys.argv[1], 'rb').read(); oracles.limit_memory(); oracles.check(data)"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", script, str(path.absolute())], cwd=folder, env=environment(), capture_output=True,
            text=True, errors="replace", timeout=120,
        )  # fmt: skip
    return "\n".join(done.stderr.splitlines()[-12:]) or "it passes without the fuzzer"


def environment() -> dict[str, str]:
    """Return the environment of a process of the fuzzer: no setting of ours, its modules on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TURBO_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    sys.exit(main())
