"""Helpers that tests share: tiny models, a simulated engine, fake devices, runs of the command."""
