"""Model families that Transformers has not, written as it writes its own; its Auto classes find them once registered."""

from __future__ import annotations


def register() -> None:
    """Make the families known to ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``; again does nothing.

    A checkpoint's own code (``auto_map``) then is not asked for: Transformers takes a class that a program registered
    before one that comes with the weights. A family that Transformers itself has by now is left to it.
    """
    from torchturbo.models import llada2

    llada2.register()
