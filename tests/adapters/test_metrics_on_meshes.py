"""What is logged beside the loss on several ranks: flops of a token, tokens, parameters that no batch reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import acceptance
import pytest
from ranks import run_ranks


def logged(rank: int, folder: str, words: list[str]) -> list[dict[str, Any]]:
    words = ["--tt_gbs", "4", "--tt_log_mfu", "--tt_card_name", "h100", *words]
    made = acceptance.trainer(folder, words, include_num_input_tokens_seen="all")
    made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_ranks(1, logged, str(tmp_path_factory.mktemp("alone")), [])[0]
    return found


@pytest.mark.parametrize(
    "plan",
    [[], ["--tt_sp_size", "2"], ["--tt_ep_size", "2"], ["--tt_sp_size", "2", "--tt_ep_size", "2"]],
    ids=["dp", "sp", "ep", "sp and ep"],
)
def test_a_token_costs_the_same_flops_on_any_mesh(plan: list[str], alone: list[dict[str, Any]], tmp_path: Path) -> None:
    """Utilisation over tokens a second a device is flops a token over the peak, which no mesh changes."""
    for rank in run_ranks(2, logged, str(tmp_path), plan):
        for expected, found in zip(alone, rank, strict=True):
            assert expected["num_input_tokens_seen"] == found["num_input_tokens_seen"]
            for name in ("mfu", "hfu"):
                cost = 2 * found[name] / found["tokens_per_second"]
                assert cost == pytest.approx(expected[name] / expected["tokens_per_second"], rel=1e-6), name
