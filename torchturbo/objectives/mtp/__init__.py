"""Multi-token prediction: heads that learn to predict further tokens ahead, one depth after the other."""
