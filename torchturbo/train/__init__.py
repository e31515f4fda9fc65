"""``torchturbo train``: fine-tuning a causal language model on local files with Hugging Face's Trainer and the engine."""
