"""Drafts: guesses of the next tokens of decoding sequences, and which of them are worth a place in a step. Token ids only."""
