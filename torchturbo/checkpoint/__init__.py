"""What a run writes: staged folders, the record of how it ran, and the comparison on resume."""
