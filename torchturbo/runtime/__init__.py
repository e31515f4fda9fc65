"""Device runtimes: what differs between CPU, CUDA and NPU, one file each behind one protocol."""

from torchturbo.runtime.base import Runtime, current_runtime

__all__ = ["Runtime", "current_runtime"]
