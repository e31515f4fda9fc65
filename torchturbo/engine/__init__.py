"""The training engine and its public arguments."""
