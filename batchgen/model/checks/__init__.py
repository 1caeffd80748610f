"""Checks of a model and of a device before they are trusted: against transformers, and against plain torch."""
