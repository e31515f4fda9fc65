"""Optimizers that the engine builds itself: Muon on sharded matrices beside AdamW, and its slow reference."""
