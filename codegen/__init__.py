"""Everything that is derived from the annotated schema. A development tool; never installed."""
