import importlib.util
from pathlib import Path

import pytest
import transformers

from batchgen.model.architectures import VERIFIED_ON

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["make_models_table", "make_families_page"])
@pytest.mark.skipif(
    not transformers.__version__.startswith(f"{VERIFIED_ON[-1]}."), reason="made with the newest version verified"
)
def test_a_page_about_models_equals_what_its_script_writes(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), f"run python docs/{name}.py"
