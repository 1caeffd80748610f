"""A run over several devices of one machine: a process each, one job."""

from batchgen.devices.base import AnyEngine
from batchgen.devices.opening import open_engine

__all__ = ["AnyEngine", "open_engine"]
