"""TorchTurbo: an engine under Hugging Face training loops, configured by one schema."""

__version__ = "0.1.0"
