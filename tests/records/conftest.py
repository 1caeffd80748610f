from support.jobs import run, write_input

__all__ = ["run", "write_input"]
