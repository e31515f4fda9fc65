"""Configuration of the FSDP2 backend."""

from torchturbo.generated.args import CPUOffloadConfig
from torchturbo.generated.config import BackendConfig

__all__ = ["BackendConfig", "CPUOffloadConfig"]
