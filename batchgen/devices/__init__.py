"""A run over several devices of one machine, or of a Ray cluster: an engine for each, one job."""

from batchgen.devices.engine import AnyEngine, Workers, open_engine

__all__ = ["AnyEngine", "Workers", "open_engine"]
