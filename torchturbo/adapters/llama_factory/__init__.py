"""The engine under LLaMA-Factory: its pt and sft stages run as they are, with the engine under their trainers.

``torchturbo llamafactory train.yaml`` and ``python -m torchturbo.adapters.llama_factory train.yaml`` are the same.
"""

from torchturbo.adapters.llama_factory.command import build_config_from_lf_args

__all__ = ["build_config_from_lf_args"]
