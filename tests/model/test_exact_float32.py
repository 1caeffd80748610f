"""Vector functions of torch on a CPU are exact to float32 from the first one on (docs/decisions/0016)."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from support.params import slow_but
from support.python_process import run_python

MODEL = Path(__file__).parents[2] / "sample_data" / "model"
# Each prints the largest error of a table of cosines of 2,048 positions.
OF_A_TABLE = """
import torch
from batchgen.model.exact_float32 import use_exact_float32
use_exact_float32()
angles = torch.outer(torch.arange(2048.0), torch.rand(32))
print(float((angles.cos() - angles.double().cos()).abs().max()))
"""
OF_A_MODEL = f"""
import torch
from batchgen.config import ModelConfig
from batchgen.model.loader import load_model
from batchgen.prompts import load_tokenizer
config = ModelConfig(model={str(MODEL)!r}, device="cpu", dtype="float32")
rotary = load_model(config, load_tokenizer(config)).module.model.rotary_emb
cos, _ = rotary(torch.zeros(1, 2048, 1), torch.arange(2048)[None])
exact = torch.outer(torch.arange(2048.0), rotary.inv_freq).double().cos()
print(float((cos[0, :, : exact.shape[1]] - exact).abs().max()))
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """A library in which the first vector functions of a process disturb each other every time."""
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    compiler = shutil.which("cc")
    if compiler is None or not torch_library.exists() or b"mkl_vml_serv_cpu_detect" not in torch_library.read_bytes():
        pytest.skip("no C compiler, or a torch without MKL's vector functions")
    library = tmp_path_factory.mktemp("window") / "window.so"
    source = Path(__file__).with_name("window.c")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    "table", slow_but([OF_A_TABLE], [OF_A_TABLE, OF_A_MODEL]), ids={OF_A_TABLE: "alone", OF_A_MODEL: "of a model"}.get
)
def test_cosines_are_exact(window, table):
    two = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    printed = run_python(table, check=True, LD_PRELOAD=str(window), **two).stdout
    assert float(printed) < 1e-7  # the largest error
