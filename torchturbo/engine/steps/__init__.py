"""The engine's steps, one module each; their order stands in torchturbo/engine/pipeline.py."""
