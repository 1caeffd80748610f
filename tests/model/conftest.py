"""The tiny model of these tests has two layers, so that mistakes between layers show."""

from pathlib import Path

import pytest

from support.tiny_model import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, with two layers."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "two-layers", num_hidden_layers=2)
