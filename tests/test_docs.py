"""The documents name tests and files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "features.md").read_text("utf-8"))))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_every_test_that_the_features_name_is_there(file: str, test: str) -> None:
    source = (ROOT / file).read_text("utf-8")
    assert not test or f"def {test}(" in source
