"""The torchturbo command."""
