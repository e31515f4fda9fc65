"""Block diffusion: a model learns to fill in masked tokens block by block, from its own noisy and clean text."""
