"""The output folder: a fresh one for each run, so that two runs never mix, and none left behind by a run that failed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchturbo.errors import BAD_INPUT
from torchturbo.quickstart import tickets
from torchturbo.quickstart.errors import QuickstartError, readable_size, refused

DEFAULT = "torchturbo-quickstart"
CONFIG = "turbo.yaml"
MODEL = "model"
RECORD = "quickstart.json"
"""What the run did and scored; its presence tells a quickstart's folder from any other."""
REMEDY = "choose another folder with --output_dir"

CONFIG_TEXT = """\
# TorchTurbo's own settings for this run; an option or an environment variable beats them.
# What a key means: torchturbo config explain gbs
mixed_precision: fp32        # a CPU without bf16 units is many times slower in bf16
gbs: 1                       # batches (of four tickets here) for each optimizer step, over all devices together
activation_checkpointing:
  enabled: false             # the model is small: keeping its activations costs little memory and saves time
"""


class Output:
    """A folder of one run, and which of it was there before."""

    def __init__(self, folder: Path, made: list[Path]) -> None:
        self.folder = folder
        self._made = made  # folders that this run created, innermost first
        self.kept = False
        self.config, self.model = folder / CONFIG, folder / MODEL
        self.train_rows, self.held_out = folder / tickets.TRAIN, folder / tickets.HELD_OUT

    @classmethod
    def claim(cls, wanted: Path, needed: int) -> Output:
        """Take the wanted folder if it is absent or empty, else the next number beside an earlier quickstart's.

        Args:
            wanted: the folder that was asked for.
            needed: bytes that the run will write.

        Raises:
            QuickstartError: it is a file, holds something else, cannot be written to, or its disk is too small.
        """
        wanted = Path(os.path.abspath(wanted))  # "." has no name to put a number behind
        try:
            output = cls._claim(wanted)
        except NotADirectoryError as error:
            raise QuickstartError(f"a part of {wanted} is a file, not a folder", REMEDY, status=BAD_INPUT) from error
        except OSError as error:
            raise refused(wanted, error, REMEDY, status=BAD_INPUT) from error
        free = shutil.disk_usage(output.folder).free
        if free < needed:
            output.discard()
            raise QuickstartError(
                f"the run writes {readable_size(needed)} to {wanted}, {readable_size(free)} are free",
                f"free some space, or {REMEDY}",
                status=BAD_INPUT,
            )
        return output

    @classmethod
    def _claim(cls, wanted: Path) -> Output:
        folder, number = wanted, 1
        while True:
            if folder.exists() and not folder.is_dir():
                raise QuickstartError(f"{folder} is a file, not a folder", REMEDY, status=BAD_INPUT)
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            output = cls(folder, made)
            if not any(folder.iterdir()) and output._mark():
                return output
            if not (folder / RECORD).is_file():
                raise QuickstartError(
                    f"{folder} is not empty and no earlier quickstart made it", REMEDY, status=BAD_INPUT
                )
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")

    def _mark(self) -> bool:
        """Write an empty record; return False if another process that started at the same moment was first."""
        try:
            with (self.folder / RECORD).open("x", encoding="utf-8") as file:
                file.write('{"finished": false}\n')
        except FileExistsError:
            return False
        except OSError:
            self.discard()
            raise
        return True

    def write_inputs(self, record: Mapping[str, Any]) -> None:
        """Write the configuration, the tickets, and a record that says the run is not finished."""
        self.write_record({**record, "finished": False})
        self.config.write_text(CONFIG_TEXT, encoding="utf-8")
        self.train_rows.write_text(tickets.data_text(tickets.TRAIN), encoding="utf-8")
        self.held_out.write_text(tickets.data_text(tickets.HELD_OUT), encoding="utf-8")

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write what is known of the run."""
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        (self.folder / RECORD).write_text(text, encoding="utf-8")

    def keep(self) -> None:
        """Make the folder stay whatever comes: it holds a trained model."""
        self.kept = True

    def discard(self) -> None:
        """Remove what this run wrote unless it is to be kept: its own files, and folders it made that are now empty."""
        if self.kept:
            return
        shutil.rmtree(self.model, ignore_errors=True)
        for path in (self.config, self.train_rows, self.held_out, self.folder / RECORD):
            path.unlink(missing_ok=True)
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return
