"""Peak throughput of devices: what a model's flops per second are divided by to give its utilisation.

Every figure is the dense bf16 peak of one device as torch sees it, without structured sparsity. Rows are data, most
specific first, and each gives its convention, its source and when that was read. This module imports no torch.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """One row of the table."""

    card: str
    """Its name in the configuration (``mfu.card``)."""
    pattern: str
    """Regular expression found in the names of the devices it holds for; matched without regard to case."""
    tflops: float
    """10^12 dense bf16 operations a second."""
    convention: str
    source: str
    date: str
    """Year and month in which the source was read."""


DENSE = "data sheet, dense (half the figure that is printed for 2:4 sparsity)"
CUBE = "cube units alone, without the vector units"
TORCHTITAN = "torchtitan 0.3.0, tools/utils.py"
TORCHTITAN_NPU = "torchtitan_npu 0.2.2.post2, patches/tools/metrics.py"

PEAKS: tuple[Peak, ...] = (
    Peak("910b1", r"\bAscend ?910B1$", 373.9, CUBE, TORCHTITAN_NPU, "2026-09"),
    # "910B" alone names four chips of 246 to 374 TFLOPS; the figure that is quoted everywhere is the 910B2's.
    Peak("910b", r"\bAscend ?910B2$", 353.9, f"910B2: {CUBE}", TORCHTITAN_NPU, "2026-09"),
    Peak("910b3", r"\bAscend ?910B3$", 294.9, CUBE, TORCHTITAN_NPU, "2026-09"),
    Peak("910b4", r"\bAscend ?910B4$", 245.8, CUBE, TORCHTITAN_NPU, "2026-09"),
    Peak("910c", r"\bAscend ?910_93\d\d$", 353.9, f"one die of two: {CUBE}", TORCHTITAN_NPU, "2026-09"),
    Peak("gb200", r"\bGB200\b", 2500.0, DENSE, TORCHTITAN, "2026-09"),
    Peak("b200", r"\bB200\b", 2250.0, DENSE, "NVIDIA HGX B200 data sheet (4.5 PFLOPS sparse)", "2026-09"),
    Peak("h200-nvl", r"\bH200 NVL\b", 836.0, DENSE, "nanochat; OLMo-core pull request 810 (1,671 sparse)", "2026-09"),
    Peak("h200", r"\bH200\b(?! NVL)", 989.0, DENSE, "https://www.nvidia.com/en-us/data-center/h200/", "2026-09"),
    Peak("h100-nvl", r"\bH[18]00 NVL\b", 835.0, DENSE, TORCHTITAN, "2026-09"),
    Peak("h100-pcie", r"\bH[18]00 PCIe\b", 756.0, DENSE, TORCHTITAN, "2026-09"),
    Peak(
        "h100", r"\bH[18]00\b(?! (NVL|PCIe))", 989.0, DENSE, "https://www.nvidia.com/en-us/data-center/h100/", "2026-09"
    ),
    Peak("h20", r"\bH20\b", 148.0, DENSE, f"{TORCHTITAN} (a review, no data sheet)", "2026-09"),
    Peak("a100", r"\bA[18]00\b", 312.0, DENSE, "https://www.nvidia.com/en-us/data-center/a100/", "2026-09"),
)

CARDS: dict[str, Peak] = {row.card: row for row in PEAKS}

# A slice of a device has a share of its peak, and its name says only the share of the memory.
SLICE = re.compile(r"\bMIG\b")


def row_of(device_name: str) -> Peak | None:
    """Return the row of a device by the name torch gives it; None for a device that the table does not know."""
    if SLICE.search(device_name):
        return None
    return next((row for row in PEAKS if re.search(row.pattern, device_name, re.IGNORECASE)), None)


class Choice(NamedTuple):
    """The row that a run uses, and what has to be said about how it was chosen."""

    peak: Peak | None
    why: str
    """One line for the log."""
    assumed: bool = False
    """Whether the device is not in the table."""


def choose(card: str | None, device_name: str, default_card: str | None) -> Choice:
    """Return the row for a run.

    Parameters
    ----------
    card
        ``mfu.card``: the user's word holds, whatever the device.
    device_name
        The device's name as torch gives it.
    default_card
        What the device's runtime assumes for a name without a row; None where there is no peak to compare with.

    """
    if card is not None:
        return Choice(CARDS[card], f"MFU against {_words(CARDS[card])}, as set by mfu.card")
    if default_card is None:
        return Choice(None, f"no MFU: there is no peak to compare {device_name} with; tokens/s are logged")
    if (known := row_of(device_name)) is not None:
        return Choice(known, f"MFU against {_words(known)}, for {device_name}")
    row = CARDS[default_card]
    why = f"no peak is known for {device_name}: MFU against {_words(row)}; set mfu.card to choose another"
    return Choice(row, why, assumed=True)


def _words(row: Peak) -> str:
    return f"{row.tflops:g} TFLOPS of {row.card} (bf16, {row.convention})"
