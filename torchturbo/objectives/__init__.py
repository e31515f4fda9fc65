"""Training objectives and the one normaliser that scales all of them."""
