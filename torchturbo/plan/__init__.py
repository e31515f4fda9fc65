"""What a run will need, worked out before it is launched: ``torchturbo plan``."""
