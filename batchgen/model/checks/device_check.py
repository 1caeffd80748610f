"""Decides which parts of batchgen run on an accelerator. Each part is tried there once and compared with plain torch; the findings are stored.

The trials (`device_trials.py`) run in a process of their own, which loads the model, because a kernel that never returns, or that breaks the
device's context, can only be ended with its process. A part that raises, hangs, or differs by more than rounding is switched off.
The findings are stored in the user's cache folder by GPU, driver, versions, and the shape and type of the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Literal

import torch

from batchgen.config import ModelConfig
from batchgen.process.child_process import Process, exit_code, how_it_ended, start_module
from batchgen.process.user_cache import cache_folder, locked, replaced
from batchgen.stats import version_of
from batchgen.version import __version__

Part = Literal["sampler", "triton", "graphs", "step-ahead"]
PARTS: dict[Part, str] = {
    "sampler": "sampling on the device",
    "triton": "batchgen's attention kernels",
    "graphs": "CUDA graphs",
    "step-ahead": "launching a step before the tokens of the last one are known",
}
"""The parts that can be switched off, in the order of their trials, with their names in messages."""
INSTEAD: dict[Part, str] = {
    "sampler": "tokens are sampled on the CPU",
    "triton": "plain torch attends",
    "graphs": "steps run without graphs",
    "step-ahead": "each step waits for the last one",
}
"""What happens without the part, in messages."""
TRIAL_SECONDS = 300.0
"""A trial that takes longer is taken to hang. Part of this is Triton's compiler: a minute for two kinds of layers on a busy machine."""
_SOURCES = ("attention/*.py", "model/cuda_*.py", "model/checks/device_trials.py", "model/runner.py", "sampling/*.py")
NO_SETTINGS = {"_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
"""Entries of a model's configuration that do not change how its steps are computed."""

_logger = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which parts are switched off on a device. An empty verdict, as for a CPU, switches nothing off."""

    device: str = ""
    """Its name in messages. Devices of one kind have one name, so that they give the same message."""
    off: Mapping[Part, str] = field(default_factory=dict)
    """The parts that are switched off, with the reason."""
    file: Path | None = None
    """The file that stores the verdict; None if it is not stored."""
    key: Mapping[str, str] = field(default_factory=dict)

    def uses(self, part: Part) -> bool:
        return part not in self.off

    def without(self, part: Part, why: str) -> Verdict:
        """Returns the verdict with this part switched off too, and stores it for the next start."""
        verdict = replace(self, off={**self.off, part: why})
        verdict.keep()
        return verdict

    def keep(self) -> None:
        """Writes the file atomically. If the folder cannot be written, the next start repeats the trials."""
        if self.file is None:
            return
        with suppress(OSError), replaced(self.file) as new:
            new.write_text(json.dumps({"key": self.key, "off": self.off}, indent=2) + "\n", encoding="utf-8")

    def notes(self) -> list[str]:
        """Returns a line for the user for each part that is off."""
        return [self.note(part) for part in PARTS if part in self.off]

    def note(self, part: Part) -> str:
        """Returns a line that says what is off, why, and how to report it."""
        where = f" with {self.file}, where it is stored (remove the file to try again)" if self.file is not None else ""
        return (
            f"{self.device}: {PARTS[part]}: switched off, {INSTEAD[part]}, which is slower, because {self.off[part]}; "
            f"please report this line{where}"
        )


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The message to a process of trials."""

    model: ModelConfig
    block_size: int
    parts: tuple[Part, ...]
    """The parts to try, in this order."""
    off: tuple[Part, ...] = ()
    """Those that have failed in an earlier process, and are neither tried again nor used."""


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A message of a process of trials. `trying`: the trial of this part begins. `failed`: this part must not be used. `unknown`: the trials
    end here, and nothing is known about the part that was being tried and those after it. `done`: all trials have ended."""

    what: Literal["trying", "failed", "unknown", "done"]
    part: Part | None = None
    why: str = ""


StartTrials = Callable[["Connection[Any, Any]", IO[bytes]], Process]


def parts_on(device: torch.device) -> tuple[Part, ...]:
    """Returns the parts to try on a device."""
    return tuple(PARTS) if device.type == "cuda" else () if device.type == "cpu" else ("sampler",)


def check_device(
    config: ModelConfig,
    device: torch.device,
    hf_config: Any,
    block_size: int,
    start: StartTrials | None = None,
    trial_seconds: float = TRIAL_SECONDS,
) -> Verdict:
    """Tries the parts on this device, or reads what an earlier start found. `start` starts the process of trials.
    A trial that takes longer than `trial_seconds` fails.

    Nothing is tried on a CPU, for a model on several devices, or with `--attention triton`, which uses the kernels without a check.
    """
    parts = parts_on(device)
    if not parts or config.device_map is not None:
        return Verdict()
    name, driver = device_identity(device)
    if config.attention == "triton":
        return Verdict(name)
    key = _key(config, hf_config, block_size, name, driver)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    verdict = Verdict(name, {}, cache_folder() / "device-checks" / f"{digest}.json", key)
    with _locked(verdict):
        kept = _kept(verdict)
        if kept is not None:
            return kept
        _logger.info("trying batchgen's kernels on %s, once for this model and these versions ...", name)
        began = time.monotonic()
        off, complete = _tried(TrialSetup(config, block_size, parts), start or start_trials, trial_seconds)
        _logger.info("tried in %.0f s, loading the model included", time.monotonic() - began)
        verdict = replace(verdict, off=off, file=verdict.file if complete else None)
        verdict.keep()
        return verdict


def device_identity(device: torch.device) -> tuple[str, str]:
    """Returns the name of a device and the version of its driver."""
    if device.type != "cuda":
        return device.type, platform.platform()
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        driver = f"{torch.version.cuda or torch.version.hip} on {platform.release()}"
    return torch.cuda.get_device_name(device), driver


def _sources() -> list[Path]:
    """Returns the files of the code that the trials try, and of the trials."""
    package = Path(__file__).parents[2]
    return sorted(path for pattern in _SOURCES for path in package.glob(pattern))


def _key(config: ModelConfig, hf_config: Any, block_size: int, name: str, driver: str) -> dict[str, str]:
    """Returns what the findings depend on."""
    settings = {k: v for k, v in hf_config.to_dict().items() if k not in NO_SETTINGS}
    sources = hashlib.sha256()
    for path in _sources():
        sources.update(path.read_bytes())
    shape = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    return {
        "device": name,
        "driver": driver,
        "batchgen": __version__,
        **{package: version_of(package) for package in ("torch", "triton", "transformers")},
        "kernels": sources.hexdigest()[:20],
        "model": f"{hf_config.model_type} {shape.hexdigest()[:20]}",
        "dtype": f"{config.dtype}, {getattr(hf_config, 'dtype', None)}",
        "options": f"--attention {config.attention} --compile {config.compile} --quantize {config.quantize} blocks of {block_size} tokens",
    }


def _kept(verdict: Verdict) -> Verdict | None:
    """Returns what an earlier start found; None if nothing is stored or it cannot be read."""
    assert verdict.file is not None
    try:
        found = json.loads(verdict.file.read_text(encoding="utf-8"))
        off = {part: str(found["off"][part]) for part in PARTS if part in found["off"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return replace(verdict, off=off)


@contextmanager
def _locked(verdict: Verdict) -> Iterator[None]:
    """Holds the verdict's lock: of several processes on GPUs of one kind, the first tries the parts and the others read what it found."""
    assert verdict.file is not None
    with ExitStack() as held:
        with suppress(OSError):  # without a lock, each process tries the parts itself
            held.enter_context(locked(verdict.file.with_suffix(".lock")))
        yield


def _tried(setup: TrialSetup, start: StartTrials, seconds: float) -> tuple[dict[Part, str], bool]:
    """Returns the parts that must not be used, with reasons, and whether to store them. A part that could not be tried is not used in this
    run and is tried again in the next.

    If a trial ends its process, another process makes those of the other parts.
    """
    off: dict[Part, str] = {}
    while len(off) < len(setup.parts):
        failed, at, unknown = _one_process(replace(setup, off=tuple(off)), start, seconds)
        off |= failed
        if unknown:
            rest = setup.parts if at is None else setup.parts[setup.parts.index(at) :]
            return dict.fromkeys(rest, f"it could not be tried ({unknown})") | off, False
        if at is None:
            break
    return off, True


def _one_process(setup: TrialSetup, start: StartTrials, seconds: float) -> tuple[dict[Part, str], Part | None, str]:
    """Runs one process of trials. Returns the failed parts with reasons; the part in whose trial the process ended early, or None; and, if the
    end says nothing about that part, what it was."""
    off: dict[Part, str] = {}
    trying: Part | None = None
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as said, ours:
        with theirs:
            process = start(theirs, said)
        try:
            ours.send(setup)
            while True:
                if not ours.poll(None if trying is None else seconds):
                    assert trying is not None
                    return {**off, trying: f"its trial did not return within {seconds:g} s"}, trying, ""
                message = ours.recv()
                if message.what == "trying":
                    trying = message.part
                elif message.what == "failed":
                    off[message.part] = message.why
                else:
                    return off, trying if message.why else None, message.why
        except (EOFError, OSError):
            code = exit_code(process)
            how = how_it_ended(code, said)
            if trying in off:  # its error has broken the device
                return off, trying, ""
            if (
                trying is None or code == -signal.SIGKILL
            ):  # the trial is not the cause: the host ran out of memory, for example
                return off, trying, how
            return {**off, trying: f"its trial ended the process ({how})"}, trying, ""
        finally:
            process.kill()
            exit_code(process)  # waits only so long: a process inside the driver may outlive its kill


def start_trials(connection: Connection[Any, Any], said: IO[bytes]) -> Process:
    """Starts the process of trials (`device_trials.main`); what it prints goes to the file `said`."""
    return start_module("batchgen.model.checks.device_trials", connection, said)
