"""Runs one job on several devices of a machine, or on a Ray cluster, with an engine for each."""

from batchgen.devices.opening import AnyEngine, open_engine
from batchgen.devices.workers import Workers

__all__ = ["AnyEngine", "Workers", "open_engine"]
