"""A run over several devices of one machine: a process each, one job."""

from batchgen.devices.engine import AnyEngine, open_engine

__all__ = ["AnyEngine", "open_engine"]
