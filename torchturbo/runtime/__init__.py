"""Device runtimes: what differs between CPU, CUDA and NPU, one file each behind one protocol."""

from torchturbo.runtime.base import Runtime
from torchturbo.runtime.choice import current_runtime

__all__ = ["Runtime", "current_runtime"]
