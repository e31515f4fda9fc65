"""Adapters: how the engine gets under a training framework's loop."""
