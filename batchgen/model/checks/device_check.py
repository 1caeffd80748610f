"""Decides which parts of batchgen run on an accelerator. They are tried there once and compared with plain torch; the finding is stored.

The trials (`device_trials.py`) run in a process of their own, which loads the model, because a kernel that never returns, or that breaks the
device's context, can only be ended with its process. The first part that raises, hangs, or differs by more than rounding is switched off, and so
are those after it, which build on it. The finding is stored in the user's cache folder by GPU, driver, versions, and the shape and type of the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
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
from batchgen.version import __version__, version_of

Part = Literal["sampler", "triton", "graphs", "step-ahead"]
PARTS: dict[Part, str] = {
    "sampler": "sampling on the device",
    "triton": "batchgen's attention kernels",
    "graphs": "CUDA graphs",
    "step-ahead": "launching a step before the tokens of the last one are known",
}
"""The parts that can be switched off, in the order of their trials, with their names in messages. Each is used only with those before it."""
INSTEAD: dict[Part, str] = {
    "sampler": "plain torch runs, and tokens are sampled on the CPU",
    "triton": "plain torch attends",
    "graphs": "steps run without graphs",
    "step-ahead": "each step waits for the last one",
}
"""What happens without the part and those after it, in messages."""
TRIAL_SECONDS = 300.0
"""A trial that takes longer is taken to hang. Part of this is Triton's compiler: a minute for two kinds of layers on a busy machine."""
_SOURCES = (
    "attention/*.py", "kernels/device_parts.py", "kernels/triton_parts.py", "model/cuda_*.py", "model/checks/device_trials.py",
    "model/runner.py", "sampling/*.py",
)  # fmt: skip
NO_SETTINGS = {"_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
"""Entries of a model's configuration that do not change how its steps are computed."""

_logger = logging.getLogger("batchgen")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which parts are used on a device: those before the one that has failed. All of them if none has, as on a CPU."""

    device: str = ""
    """Its name in messages. Devices of one kind have one name, so that they give the same message."""
    failed: Part | None = None
    why: str = ""
    """Why it has failed."""
    file: Path | None = None
    """The file that stores the verdict; None if it is not stored."""
    key: Mapping[str, str] = field(default_factory=dict)

    def uses(self, part: Part) -> bool:
        parts = list(PARTS)
        return self.failed is None or parts.index(part) < parts.index(self.failed)

    def without(self, part: Part, why: str) -> Verdict:
        """Returns the verdict for a part that has failed after all, and stores it for the next start."""
        verdict = replace(self, failed=part, why=why)
        verdict.keep()
        return verdict

    def keep(self) -> None:
        """Writes the file atomically. If the folder cannot be written, the next start repeats the trials."""
        if self.file is None:
            return
        found = {"key": self.key, "failed": self.failed, "why": self.why}
        with suppress(OSError), replaced(self.file) as new:
            new.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")

    def notes(self) -> list[str]:
        """Returns a line for the user that says what is off, why, and how to report it; none if nothing is off."""
        if self.failed is None:
            return []
        where = f" with {self.file}, where it is stored (remove the file to try again)" if self.file is not None else ""
        return [
            f"{self.device}: {PARTS[self.failed]}: switched off, {INSTEAD[self.failed]}, which is slower, because {self.why}; "
            f"please report this line{where}"
        ]


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The message to a process of trials."""

    model: ModelConfig
    block_size: int
    parts: tuple[Part, ...]
    """The parts to try, in this order."""


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A message of a process of trials: the trial of a part begins, or, with a reason, the trials end with it. Without a part, all have ended well."""

    part: Part | None
    why: str = ""
    unknown: bool = False
    """Whether the reason says nothing about the part, which could not be tried."""


def parts_on(device: torch.device) -> tuple[Part, ...]:
    """Returns the parts to try on a device."""
    return tuple(PARTS) if device.type == "cuda" else () if device.type == "cpu" else ("sampler",)


def check_device(
    config: ModelConfig,
    device: torch.device,
    hf_config: Any,
    block_size: int,
    trial_seconds: float = TRIAL_SECONDS,
) -> Verdict:
    """Tries the parts on this device, or reads what an earlier start found. A trial that takes longer than `trial_seconds` fails.
    Parts that could not be tried are not used in this run, and are tried in the next.

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
    verdict = Verdict(name, file=_file(digest), key=key)
    with _locked(verdict):
        kept = _kept(verdict)
        if kept is not None:
            return kept
        _logger.info("trying batchgen's kernels on %s, once for this model and these versions ...", name)
        began = time.monotonic()
        end = _tried(TrialSetup(config, block_size, parts), trial_seconds)
        _logger.info("tried in %.0f s, loading the model included", time.monotonic() - began)
        why = f"it could not be tried ({end.why})" if end.unknown else end.why
        verdict = replace(verdict, failed=end.part, why=why, file=None if end.unknown else verdict.file)
        verdict.keep()
        return verdict


def _file(digest: str) -> Path | None:
    """Returns the file of the user's cache that stores a verdict; None if there is no cache."""
    with suppress(OSError):
        return cache_folder() / "device-checks" / f"{digest}.json"
    return None


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
    if verdict.file is None:
        return None
    try:
        found = json.loads(verdict.file.read_text(encoding="utf-8"))
        failed = next((part for part in PARTS if part == found["failed"]), None)
        return replace(verdict, failed=failed, why=str(found["why"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _locked(verdict: Verdict) -> Iterator[None]:
    """Holds the verdict's lock: of several processes on GPUs of one kind, the first tries the parts and the others read what it found."""
    with ExitStack() as held:
        with suppress(OSError):  # without a lock, each process tries the parts itself
            if verdict.file is not None:
                held.enter_context(locked(verdict.file.with_suffix(".lock")))
        yield


def _tried(setup: TrialSetup, seconds: float) -> TrialReport:
    """Runs the process of trials. Returns its last message, or what stands for it if the process has hung or died."""
    trying: Part | None = None
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as said, ours:
        with theirs:
            process = start_trials(theirs, said)
        try:
            ours.send(setup)
            while ours.poll(None if trying is None else seconds):
                report: TrialReport = ours.recv()
                if report.part is None or report.why:
                    return report
                trying = report.part
            return TrialReport(trying, f"its trial did not return within {seconds:g} s")
        except (EOFError, OSError):
            code = exit_code(process)
            how = how_it_ended(code, said)
            if trying is None or code == -signal.SIGKILL:  # the host ran out of memory, for example
                return TrialReport(trying or setup.parts[0], how, unknown=True)
            return TrialReport(trying, f"its trial ended the process ({how})")
        finally:
            process.kill()
            exit_code(process)  # waits only so long: a process inside the driver may outlive its kill


def start_trials(connection: Connection[Any, Any], said: IO[bytes]) -> Process:
    """Starts the process of trials (`device_trials.main`); what it prints goes to the file `said`."""
    return start_module("batchgen.model.checks.device_trials", connection, said)
