"""Which modules a start of the command imports."""

from __future__ import annotations

import json

import pytest

RUN = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=open("modules.json", "w")))
from batchgen_cli.__main__ import main
main()
"""


@pytest.mark.slow
def test_a_finished_job_is_recognized_without_torch_and_transformers(python, tiny_model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    command = ["run", "rows.jsonl", "-m", str(tiny_model_dir), "-o", "o.jsonl", "--max-tokens", "2"]
    imported = []
    for _ in range(2):
        done = python(RUN, *command)
        assert done.returncode == 0, done.stderr
        imported.append(set(json.loads((tmp_path / "modules.json").read_text())))
    assert {"torch", "transformers"} <= imported[0]
    assert not {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "rich"} & imported[1]
