import importlib.util
from pathlib import Path

import pytest
import transformers

from batchgen.model.architectures import VERIFIED_ON

SCRIPT = Path(__file__).parents[2] / "docs" / "make_models_table.py"


@pytest.mark.skipif(
    not transformers.__version__.startswith(f"{VERIFIED_ON[-1]}."), reason="made with the newest version verified"
)
def test_the_block_about_models_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_models_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.BLOCK.read_text(encoding="utf-8") == script.block(), "run python docs/make_models_table.py"
