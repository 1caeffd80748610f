"""All requests of a job in depth-first order, whatever their number: sorted on disk where they do not fit one window."""

from batchgen.spool.spool import Spool

__all__ = ["Spool"]
