"""DSpark: a draft that proposes a block of tokens at once for speculative decoding, trained beside its target model."""
