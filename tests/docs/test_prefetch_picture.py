"""The picture of the FSDP2 guide is what the code of today draws."""

from __future__ import annotations

from prefetch_picture import LAYERS, PICTURE, drawn, native, timeline

from torchturbo.engine.backends.fsdp2.prefetch import prefetch_lists


def test_the_picture_is_drawn_from_the_lists() -> None:
    """Draw it anew by ``python tests/docs/prefetch_picture.py``."""
    assert drawn() == PICTURE.read_text("utf-8")


def test_the_picture_shows_what_the_page_says() -> None:
    """Native waits in every layer; the two strategies end together, and lookahead asks for experts later."""
    gathers, ends = {}, {"native": timeline(native())[1][-1].end}
    for name in ("expert_with_layer", "expert_lookahead"):
        gathered, computed = timeline(prefetch_lists(LAYERS, name, "forward", 1, 1))
        gathers[name] = {bar.unit: bar.start for bar in gathered}
        ends[name] = computed[-1].end

    assert ends["expert_with_layer"] == ends["expert_lookahead"] < ends["native"]
    for unit in ("E2", "E3"):
        assert gathers["expert_lookahead"][unit] > gathers["expert_with_layer"][unit]
