"""The contents of the wheel and the source distribution, and the layers of the packages."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_has_exactly_two_top_level_packages(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {"batchgen", "batchgen_cli"}
    assert {"batchgen/py.typed", "batchgen_cli/py.typed", "batchgen/engine/engine.py"} <= set(names)
    assert {"batchgen/report/page.js", "batchgen/report/plotly/plotly.min.js"} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_imports_follow_the_layers(command_environment):
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        env=command_environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_projects_package_of_the_same_name_is_a_one_line_error(tmp_path, command, command_environment):
    other = tmp_path / "batchgen" / "__init__.py"
    other.parent.mkdir()
    other.touch()
    environment = command_environment | {"PYTHONPATH": f"{tmp_path}:{command_environment['PYTHONPATH']}"}
    done = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"batchgen: error: {other} is another project's package of the name batchgen; "
        "run: pip uninstall -y batchgen && pip install --force-reinstall --no-deps batchgen-llm\n"
    )
