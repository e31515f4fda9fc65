"""The peak table: every device string leads to one row, and what can't be told apart is not guessed in silence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchturbo.observe.peaks import CARDS, PEAKS, choose, row_of

ROOT = Path(__file__).parents[2]

DEVICES = {
    "NVIDIA A100-SXM4-40GB": ("a100", 312),
    "NVIDIA A100-SXM4-80GB": ("a100", 312),
    "NVIDIA A100-PCIE-40GB": ("a100", 312),
    "NVIDIA A100 80GB PCIe": ("a100", 312),
    "NVIDIA A800-SXM4-80GB": ("a100", 312),
    "NVIDIA A800 80GB PCIe": ("a100", 312),
    "NVIDIA H100 80GB HBM3": ("h100", 989),
    "NVIDIA H100": ("h100", 989),
    "NVIDIA H100 PCIe": ("h100-pcie", 756),
    "NVIDIA H100 NVL": ("h100-nvl", 835),
    "NVIDIA H800": ("h100", 989),
    "NVIDIA H800 PCIe": ("h100-pcie", 756),
    "NVIDIA H200": ("h200", 989),
    "NVIDIA H200 NVL": ("h200-nvl", 836),
    "NVIDIA H20": ("h20", 148),
    "NVIDIA H20-3e": ("h20", 148),
    "NVIDIA B200": ("b200", 2250),
    "NVIDIA GB200": ("gb200", 2500),
    "Ascend910B1": ("910b1", 373.9),
    "Ascend910B2": ("910b", 353.9),
    "Ascend910B3": ("910b3", 294.9),
    "Ascend910B4": ("910b4", 245.8),
    "Ascend910_9362": ("910c", 353.9),
    "Ascend910_9372": ("910c", 353.9),
    "Ascend910_9381": ("910c", 353.9),
    "Ascend910_9382": ("910c", 353.9),
    "Ascend910_9391": ("910c", 353.9),
    "Ascend910_9392": ("910c", 353.9),
}
UNKNOWN = (
    "NVIDIA B300", "NVIDIA GB300", "NVIDIA GeForce RTX 4090", "NVIDIA A100X", "NVIDIA A10", "NVIDIA L40S",
    "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Ascend910A", "Ascend910B4-1", "Ascend310P3",
)  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_every_documented_device_string_matches_exactly_one_row(name: str) -> None:
    """The order of the rows decides nothing that a pattern could have."""
    matching = [row for row in PEAKS if re.search(row.pattern, name, re.IGNORECASE)]

    assert len(matching) == 1
    row = row_of(name)
    assert row is not None
    assert DEVICES[name] == (row.card, row.tflops)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_device_that_is_not_in_the_table_gets_no_row_of_another(name: str) -> None:
    """A slice of a device neither: its peak is a share."""
    assert row_of(name) is None


def test_cards_are_named_once_and_each_device_kind_has_one() -> None:
    """A row says where its figure is from, and 910b which of the four chips it means."""
    assert len(CARDS) == len(PEAKS)
    assert {card for card, _ in DEVICES.values()} == set(CARDS)
    assert all(row.source and row.convention and re.fullmatch(r"20\d\d-\d\d", row.date) for row in PEAKS)
    assert "910B2" in CARDS["910b"].convention
    assert CARDS["910b"].tflops == 353.9


def test_the_schemas_cards_are_the_tables() -> None:
    """With a text for each, which says 910B2 for 910b too."""
    card = json.loads((ROOT / "schema" / "torchturbo.schema.json").read_text())["$defs"]["MFUConfig"]["properties"][
        "card"
    ]

    assert sorted(CARDS) == sorted(value for value in card["enum"] if value is not None)
    assert sorted(CARDS) == sorted(card["x-torchturbo"]["values"])
    assert "910B2" in card["x-torchturbo"]["values"]["910b"]


def test_the_choice_says_what_it_rests_on() -> None:
    """A card in the configuration, the device's name, the runtime's assumption, or nothing."""
    set_by_user = choose("h100", "NVIDIA H200", "h20")
    assert set_by_user.peak is CARDS["h100"]
    assert "as set by mfu.card" in set_by_user.why

    looked_up = choose(None, "NVIDIA H200", "h20")
    assert looked_up.peak is CARDS["h200"]
    assert "989 TFLOPS of h200" in looked_up.why

    assumed = choose(None, "NVIDIA GB300", "h20")
    assert assumed.peak is CARDS["h20"]
    assert "no peak is known for NVIDIA GB300" in assumed.why and "148 TFLOPS of h20" in assumed.why

    cpu = choose(None, "CPU (x86_64, 2 threads)", None)
    assert cpu.peak is None
    assert cpu.why == "no MFU: there is no peak to compare CPU (x86_64, 2 threads) with; tokens/s are logged"


def test_a_card_given_on_a_cpu_is_used() -> None:
    """Whoever names one wants the figure."""
    assert choose("a100", "CPU (x86_64, 2 threads)", None).peak is CARDS["a100"]


def test_the_table_is_read_without_torch() -> None:
    """Doctor and the schema's test read it."""
    code = "import sys, torchturbo.observe.peaks; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
