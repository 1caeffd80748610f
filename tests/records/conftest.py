from support.runs import runs

__all__ = ["runs"]
