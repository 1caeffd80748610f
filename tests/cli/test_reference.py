"""The reference page says what the options say."""

import re
import subprocess
import sys
from pathlib import Path

from batchgen import errors
from batchgen.errors import ROW_ERROR_TYPES, BatchgenError

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_options_as_they_are():
    page = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_command_reference.py"], capture_output=True, check=True
    )
    assert page == made.stdout.decode(), "run `make reference`"


def test_the_results_page_has_every_exit_code_and_every_error_of_a_row():
    page = (ROOT / "docs" / "reference" / "results.md").read_text("utf-8")
    rows = set(
        re.findall(r"^\| `(\w+)` \|", page.partition("## Errors of a row")[2].partition("\n## ")[0], re.MULTILINE)
    )
    assert rows == set(ROW_ERROR_TYPES)
    codes = {int(code) for line in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in line.split(",")}
    raised = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, BatchgenError)}
    assert codes == raised | {0, 3, 129, 130, 143}
