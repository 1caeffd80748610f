"""The kernels are compiled once for each machine; without a compiler plain torch runs, with a note."""

import ctypes
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.opening import engine_here
from batchgen.errors import ModelError
from batchgen.kernels import build, isa
from batchgen.kernels.isa import instruction_set
from batchgen.model.loader import load_model
from batchgen.prompts.tokenizer import load_tokenizer
from support.progress import logged
from support.python_process import are_gone, runs

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


def forget():
    build.library.cache_clear()
    instruction_set.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The sources of a small library, with an empty cache."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("BATCHGEN_ISA", raising=False)
    forget()
    yield sources
    forget()


def libraries(tmp_path):
    return sorted((tmp_path / "cache" / "batchgen").glob("kernels-*/*.so"))


def without_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@needs_compiler
def test_the_library_is_compiled_once_and_cached(folder, tmp_path, monkeypatch):
    assert build.library().answer() == 42
    (kept,) = libraries(tmp_path)
    build.library.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda to: pytest.fail("compiled again"))
    assert isinstance(build.library(), ctypes.CDLL)
    assert libraries(tmp_path) == [kept]


@needs_compiler
def test_progress_is_logged_only_when_something_is_compiled(folder, tmp_path):
    (folder / "other.cpp").write_text("int other = 1;\n")
    with logged("batchgen", "INFO") as said:
        build.library()
        build.library.cache_clear()
        build.library()
    begun, halfway, done = said
    assert begun == "compiling kernels for this processor, once on this machine ..."
    assert halfway == "compiling kernels: 1 of 2 files done"
    place = re.escape(str(tmp_path))
    assert re.fullmatch(rf"kernels compiled in \d+ s, kept in {place}/cache/batchgen/kernels-\w+", done)


@needs_compiler
def test_one_of_several_processes_compiles_and_the_others_wait(folder):
    with logged("batchgen", "INFO") as said, ThreadPoolExecutor(4) as pool:
        places = set(pool.map(lambda _: build._compiled(), range(4)))
    assert places == {build._target()}
    assert len(said) == 2


@needs_compiler
def test_other_sources_or_other_instructions_make_another_library(folder, tmp_path, monkeypatch):
    first = build._target()
    (folder / "answer.cpp").write_text(SOURCE + "\n")
    second = build._target()
    monkeypatch.setattr(build, "flags", lambda: ["-mother"])
    assert len({first, second, build._target()}) == 3


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "no digest", "half of it empty", "one bit"])
def test_a_damaged_library_is_compiled_again(folder, tmp_path, damage):
    target = build._compiled()
    whole = target.read_bytes()
    if damage == "cut":
        target.write_bytes(whole[:4])
    elif damage == "no digest":
        build._digest_file(target).unlink()
    elif damage == "half of it empty":  # loading would succeed, and a call end the process
        target.write_bytes(whole[: len(whole) // 2].ljust(len(whole), b"\0"))
    else:
        target.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert build.library().answer() == 42
    assert build._is_whole(target)


@needs_compiler
@pytest.mark.parametrize("digest", [None, "another"])
def test_kernels_in_a_cache_that_is_only_read(folder, monkeypatch, digest):
    target = build._compiled()
    build._digest_file(target).unlink()
    if digest is not None:
        build._digest_file(target).write_text(digest)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(build.Path, "unlink", refused)
    with logged("batchgen", "INFO") as said:
        assert build.library().answer() == 42
    # Without a digest, an earlier version has made them. With another one, they are damaged.
    assert [*said] == [] if digest is None else "this run compiles its own" in said[0]


@pytest.mark.parametrize(
    ("machine", "has", "unknown", "left"),
    [
        ("x86_64", {"avx2", "fma", "f16c", "avx_vnni"}, "-mavxvnni", ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]),
        ("aarch64", {"asimd", "asimddp", "bf16"}, "*+bf16", ["-march=armv8.2-a+simd+dotprod"]),
        ("aarch64", {"asimd", "asimddp", "bf16"}, "*+dotprod*", ["-march=armv8-a+simd"]),
    ],
)
def test_instructions_that_an_older_compiler_does_not_know_are_left_out(
    folder, tmp_path, monkeypatch, machine, has, unknown, left
):
    older = tmp_path / "older"
    older.write_text(f'#!/bin/sh\nfor option; do case "$option" in {unknown}) exit 1;; esac; done\n')
    older.chmod(0o700)
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    monkeypatch.setattr(isa, "features", lambda: frozenset(has))
    assert build._options(str(older)) == [*build.FLAGS, *left]


@needs_compiler
def test_what_a_killed_process_has_left_is_removed_before_the_kernels_are_compiled_again(folder, tmp_path):
    left = build._target().parent / "unfinished-abc"
    left.mkdir(parents=True)
    (left / "answer.o").write_bytes(b"half")
    assert build.library().answer() == 42
    assert sorted(file.name for file in build._target().parent.iterdir()) == ["kernels.sha256", "kernels.so", "lock"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_compiler_that_hangs_when_it_is_asked_for_its_flags_is_ended(folder, tmp_path, monkeypatch, interrupted):
    slow, pids = tmp_path / "slow", tmp_path / "pids"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ >> {pids}\nexec sleep 600 2>/dev/null\n')
    slow.chmod(0o700)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(build, "PROBE_TIMEOUT", 600 if interrupted else 0.5)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(build.library)
        if interrupted:
            with pytest.raises(KeyboardInterrupt), build.compiling():
                while not pids.exists() or not pids.read_text().endswith("\n"):
                    time.sleep(0.01)
                raise KeyboardInterrupt
        else:
            assert str(made.exception()) == "the C++ compiler was not done after 0 s"
        assert isinstance(made.exception(), build.NoKernels)
    assert not any(runs(pid) for pid in pids.read_text().split())


@needs_compiler
def test_an_error_ends_the_compilers_that_another_thread_has_started(folder, tmp_path, monkeypatch):
    (folder / "other.cpp").write_text("")
    slow, pids = tmp_path / "slow", tmp_path / "pids"
    slow.write_text(
        '#!/bin/sh\ncase " $* " in *" -c "*) ;; *) exit 0;; esac\n'
        f"sleep 600 2>/dev/null &\necho $$ $! >> {pids}\nwait\n"
    )
    slow.chmod(0o700)
    monkeypatch.setenv("CXX", str(slow))
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt), build.compiling():
            made = pool.submit(build.library)
            while not pids.exists() or len(pids.read_text().split()) < 4:
                time.sleep(0.01)
            raise KeyboardInterrupt
        assert isinstance(made.exception(), build.NoKernels)
    assert are_gone(pids.read_text().split())
    assert [file.name for file in build._target().parent.iterdir()] == ["lock"]
    monkeypatch.delenv("CXX")
    assert build.library().answer() == 42


def test_a_model_that_cannot_be_loaded_ends_the_compilers(tiny_model_dir, monkeypatch):
    seen = []

    @contextmanager
    def compiling():
        with pytest.raises(ModelError) as error:
            yield
        seen.append(error.value.message)
        raise error.value

    def fail(*_):
        raise ModelError("damaged")

    monkeypatch.setattr(build, "compiling", compiling)
    monkeypatch.setattr("batchgen.model.loader.load_model", fail)
    config = ModelConfig(model=str(tiny_model_dir), device="cpu")
    with pytest.raises(ModelError):
        engine_here(config, load_tokenizer(config), EngineConfig())
    assert seen == ["damaged"]


@pytest.mark.parametrize(
    ("wish", "why"),
    [("none", "BATCHGEN_ISA=none switches the CPU kernels off"), (None, "no CPU kernels for this processor")],
)
def test_why_a_processor_has_no_kernels_is_told(folder, monkeypatch, wish, why):
    monkeypatch.setattr(build, "instruction_set", lambda: isa.NONE)
    if wish is not None:
        monkeypatch.setenv("BATCHGEN_ISA", wish)
    with pytest.raises(build.NoKernels, match=why):
        build.library()


@needs_compiler
def test_the_compilers_message_is_reported(folder):
    (folder / "answer.cpp").write_text("int broken(;\n")
    with pytest.raises(build.NoKernels, match=r"the C\+\+ compiler failed: .*answer\.cpp:1.*error"):
        build.library()


@needs_compiler
def test_kernels_that_cannot_be_kept_are_compiled_for_this_run(folder, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    with logged("batchgen", "INFO") as said:
        assert build.library().answer() == 42
    assert said[0].startswith(f"compiled kernels cannot be kept ({tmp_path}/cache/batchgen")
    assert "this run compiles its own; set XDG_CACHE_HOME" in said[0]
    assert not list(tmp_path.glob("batchgen-*"))


@needs_compiler
def test_kernels_that_a_full_cache_has_no_room_for_are_compiled_for_this_run(folder, tmp_path, monkeypatch):
    full = tmp_path / "g++-on-a-full-disk"
    said_by_it = "answer.o: Fatal error: can't write 29 bytes: No space left on device"
    full.write_text(f'#!/bin/sh\ncase "$*" in */cache/*.o) echo "{said_by_it}" >&2; exit 1;; esac\nexec g++ "$@"\n')
    full.chmod(0o700)
    monkeypatch.setenv("CXX", str(full))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    with logged("batchgen", "INFO") as said:
        assert build.library().answer() == 42
    why = f"the C++ compiler failed: {said_by_it}"
    assert f"compiled kernels cannot be kept ({why}), so this run compiles its own; set XDG_CACHE_HOME" in said
    assert not libraries(tmp_path)


@needs_compiler
def test_kernels_in_a_cache_from_which_no_code_may_run_are_compiled_for_this_run(folder, tmp_path, monkeypatch):
    def load(path, loaded=ctypes.CDLL):
        if path.startswith(f"{tmp_path}/cache"):
            raise OSError("failed to map segment from shared object")
        return loaded(path)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with logged("batchgen", "INFO") as said:
        assert build.library().answer() == 42
    assert said[-1].endswith("mounted with noexec), so this run compiles its own; set XDG_CACHE_HOME")


@needs_compiler
def test_without_any_folder_for_kernels_the_cache_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(build.NoKernels, match=rf"compiled kernels cannot be kept \({tmp_path}/cache/batchgen"):
        build.library()


def load(tiny_model_dir, **options):
    config = ModelConfig(model=str(tiny_model_dir), device="cpu", **options)
    return load_model(config, load_tokenizer(config))


def test_auto_runs_plain_torch_without_a_compiler_and_says_so(folder, tmp_path, monkeypatch, tiny_model_dir):
    without_compiler(monkeypatch, tmp_path)
    model = load(tiny_model_dir)
    assert model.kernels is None
    assert model.notes == ("no C++ compiler (g++) was found; plain torch runs, which is slower on a CPU",)


def test_on_is_refused_without_a_compiler(folder, tmp_path, monkeypatch, tiny_model_dir):
    without_compiler(monkeypatch, tmp_path)
    with pytest.raises(ModelError) as refused:
        load(tiny_model_dir, compile="on")
    assert str(refused.value) == ("--compile on: no C++ compiler (g++) was found; leave it out, and plain torch runs")
