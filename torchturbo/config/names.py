"""The nearest name to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], limit: int = 1) -> list[str]:
    """Return up to ``limit`` known names that a person may have meant, the likeliest first."""
    import difflib  # only where something is wrong

    folded: dict[str, str] = {}
    for item in known:
        folded.setdefault(item.lower().replace("-", "_"), item)
    name = name.lower().replace("-", "_")[:200]
    if not name:
        return []
    begins = [item for item in folded if len(name) >= 2 and item.startswith(name)]
    close = difflib.get_close_matches(name, folded, n=limit, cutoff=0.6)
    if close and difflib.SequenceMatcher(None, name, close[0]).ratio() >= 0.9:
        begins = []  # a slip of the finger, not a name cut short
    return [folded[item] for item in dict.fromkeys([*begins, *close])][: max(limit, len(begins[:4]))]


def did_you_mean(name: str, known: Iterable[str], limit: int = 1) -> str:
    """Return the question of an error's remedy, or nothing."""
    names = nearest(name, known, limit)
    return f"did you mean {' or '.join(names)}?" if names else ""
