from support.jobs import open_fixture, run, texts, write_input

__all__ = ["open_fixture", "run", "texts", "write_input"]
