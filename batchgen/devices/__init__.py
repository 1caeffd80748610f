"""A run over several devices of one machine, or of a Ray cluster: an engine for each, one job."""

from batchgen.devices.opening import AnyEngine, open_engine
from batchgen.devices.workers import Workers

__all__ = ["AnyEngine", "Workers", "open_engine"]
