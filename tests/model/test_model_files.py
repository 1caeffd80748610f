"""A model's folder is not trusted: nothing in it is unpickled or run, and a model that needs that is refused."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.model.loader import load_model
from batchgen.prompts import load_tokenizer

NAMES = [
    "pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "vocab.pkl",
    "tokenizer.pkl", "tokenizer.bin", "merges.pkl", "vocab.bin", "state_dict.pt", "generation_config.pkl",
]  # fmt: skip


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def load(folder: Path):
    config = ModelConfig(model=str(folder), device="cpu")
    return load_model(config, load_tokenizer(config))


def pickled(folder: Path, mark: Path) -> None:
    for name in NAMES:
        (folder / name).write_bytes(pickle.dumps(Touch(mark)))


def test_pickles_beside_a_model_are_not_opened(folder, tmp_path):
    mark = tmp_path / "ran"
    pickled(folder, mark)
    load(folder)
    assert not mark.exists()
    pickle.loads((folder / NAMES[0]).read_bytes())
    assert mark.exists()  # unpickling them would have been noticed


def own_code(folder: Path, name: str, **changes: object) -> Path:
    """Makes the configuration name code in the folder. Returns the file that this code would create."""
    mark = folder / "ran"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    return mark


def test_a_model_that_needs_its_own_code_is_refused_in_one_line_and_the_code_not_run(folder):
    names = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.C"}
    mark = own_code(folder, "config.json", model_type="own", auto_map=names)
    with pytest.raises(ModelError) as e:
        load(folder)
    assert str(e.value) == (
        f"the configuration of model {str(folder)!r} needs Python code that comes with the model; "
        f"read the .py files in {folder} and add --trust-remote-code if you trust them, or use a checkpoint that needs no code"
    )
    assert not mark.exists()


def test_a_known_model_that_also_brings_code_is_loaded_without_it(folder):
    names = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.C"}
    config = own_code(folder, "config.json", auto_map=names)
    tokenizer = own_code(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.C", None]})
    load(folder)
    assert not config.exists()
    assert not tokenizer.exists()
