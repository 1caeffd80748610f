"""The program never runs data as code and writes only where it was asked to."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "batchgen").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "torch.load", "numpy.load", "np.load", "np.fromfile", "os.system", "os.popen", "yaml.load", "pd.read_pickle",
    "subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_output", "subprocess.check_call", "torch.compile.load",
}  # fmt: skip
LAST_NAMES = {name.rpartition(".")[2] for name in CALLS | ATTRIBUTES}
ALLOW = {"allow_pickle", "weights_only", "shell"}


def forbidden(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            last = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if last in LAST_NAMES and (name := ast.unparse(node.func)) in CALLS | ATTRIBUTES:
                found.append(name)
            found += [str(word.arg) for word in node.keywords if word.arg in ALLOW]
    return found


# The compiler, and processes that batchgen starts itself: one for each device, one that renders templates, and one that checks the kernels on a GPU.
# It talks to them over sockets that no other process has.
ALLOWED = {
    "batchgen/kernels/build.py": ["subprocess.Popen", "subprocess.run"],
    "batchgen/process/child_process.py": ["subprocess.Popen"],
    "batchgen/process/template_renderer.py": ["pickle"],
    "batchgen/process/templates.py": ["pickle"],
    "batchgen/jobs/files/row_memory.py": ["marshal", "pickle"],  # rows are written for a digest, and nothing is read
    "batchgen/devices/transport.py": ["pickle"],
    "batchgen/devices/ray_cluster.py": ["pickle"],  # Ray pickles everything, and a cluster runs any code it is given
}


def test_only_the_listed_sources_unpickle_evaluate_or_start_programs():
    found = {path.relative_to(ROOT).as_posix(): sorted(forbidden(path.read_text("utf-8"))) for path in SOURCES}
    assert {path: calls for path, calls in found.items() if calls} == ALLOWED


def test_the_search_finds_forbidden_calls():
    source = (
        "import pickle\nfrom yaml import load\neval('1')\ntorch.load(x)\nnp.load(x, allow_pickle=True)\nre.compile('a')"
    )
    assert sorted(forbidden(source)) == ["allow_pickle", "eval", "np.load", "pickle", "torch.load", "yaml"]


def there(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.slow
def test_a_job_writes_only_beside_its_output_and_to_the_users_cache(
    tmp_path, tiny_chat_model_dir, command, command_environment
):
    folders = {name: tmp_path / name for name in ("home", "tmp", "cwd", "out", "in", "cache")}
    for folder in folders.values():
        folder.mkdir()
    for name in ("a", "b"):
        (folders["in"] / f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}\n' * 20)
    model_before = there(tiny_chat_model_dir)
    environment = {
        **{name: value for name, value in command_environment.items() if not name.startswith(("HF_HOME", "XDG_"))},
        "HOME": str(folders["home"]),
        "TMPDIR": str(folders["tmp"]),
        "HF_HOME": str(folders["cache"]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    output = folders["out"] / "o.parquet"
    run = [
        *command,
        "run",
        str(folders["in"]),
        "--model",
        str(tiny_chat_model_dir),
        "-o",
        str(output),
        "--max-tokens",
        "2",
    ]
    done = subprocess.run(run, cwd=folders["cwd"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    out = there(folders["out"])
    assert {name.split("/")[0] for name in out} == {"o.parquet", "o.parquet.job"}
    assert there(folders["in"]) == ["a.jsonl", "b.jsonl"]
    assert {name: there(folders[name]) for name in ("tmp", "cwd", "cache")} == {"tmp": [], "cwd": [], "cache": []}
    kept = [name for name in there(folders["home"]) if not (folders["home"] / name).is_dir()]
    names = [re.sub(r"[0-9a-f]{20}", "*", name.removeprefix(".cache/batchgen/")) for name in kept]
    compiled = ["kernels-*/kernels.sha256", "kernels-*/kernels.so", "kernels-*/lock"]  # where there is a compiler
    assert [name for name in names if not name.startswith("step-costs/")] in (compiled, [])
    assert there(tiny_chat_model_dir) == model_before
