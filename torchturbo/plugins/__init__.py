"""Plugins: code of the user's own that runs at fixed places of a training run."""

from torchturbo.plugins.contract import Plugin, Run, register

__all__ = ["Plugin", "Run", "register"]
