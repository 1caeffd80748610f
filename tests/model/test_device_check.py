"""An emulated device whose parts raise, give wrong numbers or never return: the first faulty part and those after it are switched off, and jobs give
correct output."""

import json
import os
import signal
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch

from batchgen.config import ModelConfig
from batchgen.llm import LLM
from batchgen.model.adapter import prepare
from batchgen.model.checks import device_check, device_trials
from batchgen.model.checks.device_check import PARTS, TrialReport, TrialSetup, Verdict, check_device
from batchgen.model.loaded_model import AttentionKind
from batchgen.prompts import load_tokenizer
from support.fake_device import Capture, FakeAttention, ThreadOfTrials, check_as_on_a_gpu, faulty, use_fake_device
from support.models import build, engine_for, make_requests, plain_llama, run, token_ids
from support.params import slow_but

CPU = torch.device("cpu")
CONFIG = ModelConfig(model="some/model")
SETUP = TrialSetup(CONFIG, 32, tuple(PARTS))
DONE = TrialReport(None)


def trying(*parts):
    return list(map(TrialReport, parts))


@pytest.fixture(scope="module")
def model():
    return plain_llama()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(device_check, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "device-checks"


def run_trials(model):
    """Runs the trials in this process. Returns the parts that were tried, and the last message."""
    told = []
    device_trials.run_trials(SETUP, model, told.append)
    return [message.part for message in told[:-1]], told[-1]


# -- the trials


def test_parts_that_agree_with_plain_torch_pass(model, monkeypatch):
    steps = use_fake_device(monkeypatch)
    assert run_trials(model) == (list(PARTS), DONE)
    assert max(len(step._graphs.captured) for step in steps if step._graphs) > 0


def raises(out):
    raise RuntimeError("CUDA error: misaligned address")


def no_number(out):
    return out.index_fill(0, torch.tensor([0]), float("nan"))


def one_of_a_thousand(out):
    """Makes every 1000th element 5 % too large."""
    flat = out.flatten().clone()
    flat[::1000] *= 1.05
    return flat.view_as(out)


def rounding(out):
    """Moves every element by up to four units in the last place, as sums in another order do."""
    return out * (1 + 4 * torch.finfo(out.dtype).eps * (2 * torch.rand_like(out) - 1))


class Misplaced(FakeAttention):
    """Writes a value to a place that belongs to no token, so that no output changes."""

    def __call__(self, layer, *arguments):
        out = super().__call__(layer, *arguments)
        self.cache.values[layer][0, -1, -1] = 1.0
        return out


class Mistaken(FakeAttention):
    """Fails only when the model calls it, as kernels that read the model's strides wrongly but pass with contiguous tensors."""

    def __call__(self, layer, q_HTD, *arguments):
        out = super().__call__(layer, q_HTD, *arguments)
        return out.roll(1, 1) if len(self.cache.keys) > 1 else out


def full(out):
    raise torch.OutOfMemoryError("CUDA out of memory")


def stale(replays):
    """Returns a capture whose graph does nothing after `replays` replays."""

    class Stale(Capture):
        def recorded(self, forward):
            times = iter(range(100))
            return lambda: forward() if next(times) < replays else None

    return Stale()


def failing(forward):
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("faults", "part", "why"),
    [
        ({"attention": faulty(raises)}, "triton", "RuntimeError: CUDA error: misaligned address"),
        ({"attention": faulty(no_number)}, "triton", "the attention kernels give other numbers than plain torch"),
        ({"attention": faulty(one_of_a_thousand)}, "triton", "the attention kernels give other numbers than plain torch"),
        ({"attention": Misplaced}, "triton", "the attention kernels write other KV than plain torch"),
        ({"attention": Mistaken}, "triton", "with the attention kernels the model's logits of "),
        ({"attention": faulty(full)}, "triton", "OutOfMemoryError: CUDA out of memory"),
        ({"capture": lambda: stale(2)}, "graphs", "as CUDA graphs the model's logits of "),
        ({"capture": lambda: failing}, "graphs", "the model cannot be captured as a CUDA graph and runs without, which is slower: operation"),
    ],
    ids=["raises", "no number", "one of a thousand", "misplaced", "mistaken", "full", "stale graphs", "no graphs"],
)  # fmt: skip
def test_a_faulty_part_is_found_and_what_builds_on_it_is_not_tried(model, monkeypatch, faults, part, why):
    use_fake_device(monkeypatch, **faults)
    parts, last = run_trials(model)
    tried = ["sampler", "triton", "graphs"]
    assert (parts, last.part) == (tried[: tried.index(part) + 1], part)
    assert last.unknown == why.startswith("OutOfMemory")  # which is no fault of the kernels
    assert last.why.startswith(why)


SOFT = {"sliding_window": 24, "softcap": 20.0, "sinks": torch.float32}


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.bfloat16, torch.float16]))
def test_rounding_in_half_precision_is_not_a_fault_but_one_wrong_element_in_a_thousand_is(monkeypatch, dtype):
    kind = AttentionKind(heads=2, group=4, k_size=32, v_size=32, dtype=dtype, scale=32**-0.5, **SOFT)
    on = SimpleNamespace(dtype=dtype, device=CPU)

    class Rounded(FakeAttention):
        """Computes in float32 and rounds the result, as kernels do."""

        def __call__(self, layer, q_HTD, k_KTD, v_KTV, options):
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            self.cache.keys[layer], self.cache.values[layer] = keys.float(), values.float()
            out = super().__call__(layer, q_HTD.float(), k_KTD.float(), v_KTV.float(), options)
            keys.copy_(self.cache.keys[layer])
            values.copy_(self.cache.values[layer])
            self.cache.keys[layer], self.cache.values[layer] = keys, values
            return out.to(dtype)

    class Wrong(Rounded):
        def __call__(self, *arguments):
            return one_of_a_thousand(super().__call__(*arguments).float()).to(dtype)

    with torch.inference_mode():
        use_fake_device(monkeypatch, attention=Rounded)
        device_trials.attention_trial(kind, on, 32)
        use_fake_device(monkeypatch, attention=Wrong)
        with pytest.raises(device_trials.Differs, match="give other numbers than plain torch"):
            device_trials.attention_trial(kind, on, 32)


def test_tokens_that_the_device_returns_wrong_switch_off_the_step_ahead(model, monkeypatch):
    use_fake_device(monkeypatch)

    class Late(device_trials.Readback):
        def lists(self):
            return [[token + (len(launched) > 1 and token > 0) for token in part] for part in super().lists()]

    launched = []
    steps = device_trials.run_steps

    def counted(scheduler, launch, ahead=0):
        def one(batch):
            launched.append(batch)
            wait = launch(batch)

            def waited():
                try:
                    return wait()
                finally:
                    launched.pop()

            return waited

        steps(scheduler, one, ahead)

    monkeypatch.setattr(device_trials, "Readback", Late)
    monkeypatch.setattr(device_trials, "run_steps", counted)
    assert run_trials(model)[1] == TrialReport("step-ahead", "the device returns other tokens than it has sampled")


@pytest.mark.parametrize("wrong", slow_but(["measured"], ["tokens", "valid", "measured"]))
def test_a_faulty_sampler_on_the_device_is_found(model, monkeypatch, wrong):
    made = []

    class Sampler(device_trials.Sampler):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

        def sample(self, *arguments):
            out = super().sample(*arguments)
            if self is made[0]:
                return out
            numbers = getattr(out, wrong).clone()
            numbers[:3] = ~numbers[:3] if wrong == "valid" else numbers[:3] + 1
            return replace(out, **{wrong: numbers})

    use_fake_device(monkeypatch)
    monkeypatch.setattr(device_trials, "Sampler", Sampler)
    parts, last = run_trials(model)
    assert (parts, last.part, last.unknown) == (["sampler"], "sampler", False)


def test_logits_of_a_few_tokens_may_differ_where_rounding_chooses_experts():
    want = torch.zeros(40, 5)
    got = want.clone()
    got[:4] = 1.0
    device_trials.compare_logits("so", got, want, 0.1, routed=True)
    with pytest.raises(
        device_trials.Differs, match=r"^so the model's logits of 4 of 40 tokens differ .* by up to 1 \(rounding: 0.1\)$"
    ):
        device_trials.compare_logits("so", got, want, 0.1, routed=False)
    got[4] = 1.0
    with pytest.raises(device_trials.Differs):
        device_trials.compare_logits("so", got, want, 0.1, routed=True)
    got = want.clone()
    got[0, 0] = float("nan")
    with pytest.raises(device_trials.Differs, match="not numbers"):
        device_trials.compare_logits("so", got, want, 0.1, routed=True)


# -- the processes, and what is kept


class Scripted:
    """Trial processes that send scripted messages and then end with a scripted exit code (None: never)."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.parts = []
        self.killed = 0

    def __call__(self, connection, said):
        messages, self.code, words = self.scripts.pop(0)
        end = Connection(os.dup(connection.fileno()))
        for message in messages:
            end.send(message)
        said.write(words)
        Thread(target=self._end, args=(end,), daemon=True).start()
        return self

    def _end(self, end):
        end.recv()
        if self.code is None:
            Event().wait()
        end.close()

    def wait(self, timeout=None):
        return self.code

    def kill(self):
        self.killed += 1


def hf_config(**settings):
    return SimpleNamespace(model_type="llama", dtype="bfloat16", to_dict=lambda: settings)


def check(monkeypatch, *scripts, config=CONFIG, settings=None, seconds=300.0, **options):
    start = Scripted(*scripts)
    check_as_on_a_gpu(monkeypatch, start, **options)
    verdict = check_device(config, CPU, hf_config(**settings or {"head_dim": 64}), 32, trial_seconds=seconds)
    assert not start.scripts, "a process was not started"
    return verdict


ALL_WELL = ([*trying(*PARTS), DONE], 0, b"")
TRITON_FAILED = ([*trying("sampler", "triton"), TrialReport("triton", "it is wrong")], 0, b"")


def test_a_trial_that_hangs_is_killed(monkeypatch, cache):
    verdict = check(monkeypatch, (trying("sampler", "triton"), None, b""), seconds=0.05)
    assert (verdict.failed, verdict.why) == ("triton", "its trial did not return within 0.05 s")
    assert json.loads(next(cache.glob("*.json")).read_text())["failed"] == "triton"


@pytest.mark.parametrize(
    ("code", "said", "how"),
    [
        (-signal.SIGSEGV, b"one\nFatal: two\n\n", "SIGSEGV: Fatal: two"),
        (1, b"", "exit code 1"),
    ],
)
def test_a_trial_that_crashes_its_process_fails_its_part(monkeypatch, code, said, how):
    verdict = check(monkeypatch, (trying("sampler", "triton", "graphs"), code, said))
    assert (verdict.failed, verdict.why) == ("graphs", f"its trial ended the process ({how})")
    assert [part for part in PARTS if verdict.uses(part)] == ["sampler", "triton"]


@pytest.mark.parametrize(
    ("script", "part", "why"),
    [
        (([], 1, b"no memory\n"), "sampler", "exit code 1: no memory"),
        (([TrialReport("sampler", "ModelError: no such file", unknown=True)], 1, b""), "sampler", "ModelError: no such file"),
        ((trying("sampler", "triton"), -signal.SIGKILL, b""), "triton", "SIGKILL"),
        (([*trying("sampler", "triton"), TrialReport("triton", "full", unknown=True)], 0, b""), "triton", "full"),
    ],
)  # fmt: skip
def test_a_part_that_could_not_be_tried_is_off_and_tried_again_at_the_next_start(monkeypatch, cache, script, part, why):
    """For example because the model cannot be loaded, or because memory ran out."""
    verdict = check(monkeypatch, script)
    assert (verdict.failed, verdict.why) == (part, f"it could not be tried ({why})")
    assert list(cache.glob("*.json")) == []
    assert check(monkeypatch, ALL_WELL).failed is None


def test_the_verdict_is_stored_and_told_at_every_start(monkeypatch):
    verdict = check(monkeypatch, TRITON_FAILED)
    assert verdict.notes() == [
        "Fake GPU: batchgen's attention kernels: switched off, plain torch attends, which is slower, because it is wrong; "
        f"please report this line with {verdict.file}, where it is stored (remove the file to try again)"
    ]
    assert check(monkeypatch) == verdict  # no process is started
    verdict.file.unlink()
    assert check(monkeypatch, ALL_WELL).failed is None
    assert check(monkeypatch).failed is None


def test_trials_run_again_for_another_version_driver_gpu_model_or_dtype(monkeypatch):
    check(monkeypatch, TRITON_FAILED)
    check(monkeypatch, ALL_WELL, name="Another GPU")
    check(monkeypatch, ALL_WELL, settings={"head_dim": 128})
    check(monkeypatch, ALL_WELL, config=replace(CONFIG, dtype="float16"))
    check(monkeypatch, ALL_WELL, config=replace(CONFIG, compile="off"))
    versions = device_check.version_of
    for package in ("torch", "triton", "transformers"):
        monkeypatch.setattr(
            device_check, "version_of", lambda name, of=package: "9.9.9" if name == of else versions(name)
        )
        check(monkeypatch, ALL_WELL)
        assert check(monkeypatch).failed is None
    monkeypatch.setattr(device_check, "version_of", versions)
    with monkeypatch.context() as patch:
        patch.setattr(device_check, "__version__", "9.9.9")
        check(patch, ALL_WELL)
    assert check(monkeypatch, settings={"head_dim": 64, "_name_or_path": "elsewhere"}).failed == "triton"


def test_an_unreadable_verdict_is_replaced(monkeypatch):
    file = check(monkeypatch, TRITON_FAILED).file
    for broken in ("", "[]", '{"failed": "triton"}', '{"key": {}}'):
        file.write_text(broken)
        assert check(monkeypatch, ALL_WELL).failed is None


def test_without_a_cache_that_can_be_written_trials_run_at_every_start(monkeypatch, tmp_path):
    def no_home():
        raise OSError("Could not determine home directory.")

    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert check(monkeypatch, TRITON_FAILED).failed == "triton"
    monkeypatch.setattr(device_check, "cache_folder", no_home)
    for _ in range(2):
        verdict = check(monkeypatch, TRITON_FAILED)
        assert (verdict.failed, verdict.file) == ("triton", None)


def test_without_parts_to_try_no_process_starts(monkeypatch):
    assert check(monkeypatch, config=replace(CONFIG, attention="triton")) == Verdict("Fake GPU")
    assert check(monkeypatch, config=replace(CONFIG, device_map="auto")) == Verdict()
    monkeypatch.undo()
    assert check_device(CONFIG, CPU, None, 32) == Verdict()
    assert [device_check.parts_on(torch.device(kind)) for kind in ("cpu", "mps", "cuda")] == [
        (),
        ("sampler",),
        tuple(PARTS),
    ]


@pytest.mark.slow
def test_the_trial_process_loads_the_model_and_runs_the_trials(tiny_model_dir, monkeypatch, cache):
    """On the CPU, which has no kernels or graphs to try: only the sampler and the step ahead."""
    config = ModelConfig(model=str(tiny_model_dir), device="cpu", dtype="float32")
    monkeypatch.setattr(device_check, "parts_on", lambda device: tuple(PARTS))
    monkeypatch.setattr(device_check, "device_identity", lambda device: ("Fake GPU", "driver 1"))
    verdict = check_device(config, CPU, load_tokenizer(config).hf_config, 32)
    assert verdict.failed is None
    assert [json.loads(file.read_text())["failed"] for file in cache.glob("*.json")] == [None]
    missing = replace(config, model=str(tiny_model_dir / "nothing"))
    assert check_device(missing, CPU, hf_config(other=1), 32).failed == "sampler"
    assert len(list(cache.glob("*.json"))) == 1


# -- whole jobs on an emulated device

PROMPTS = ["The prefix that all of them share, and " + end for end in ("one", "two", "three", "")]


@pytest.fixture(scope="module")
def want(tiny_model_dir):
    with LLM(tiny_model_dir, device="cpu", compile="off") as llm:
        return [r.text for r in llm.generate(PROMPTS, {"max_tokens": 12})]


def job(tiny_model_dir, **options):
    with LLM(tiny_model_dir, device="cpu", compile="auto", **options) as llm:
        return [r.text for r in llm.generate(PROMPTS, {"max_tokens": 12})], llm.engine.attention, list(llm.engine.notes)


def never(out):
    Event().wait()


# Faults, the first part that they switch off, the attention that remains, and the seconds that a trial may take (few only where one hangs, since
# the others may be slow on a busy machine).
JOB_FAULTS = [
    pytest.param({"attention": faulty(rounding)}, None, "triton", 600.0, id="kernels round otherwise", marks=pytest.mark.slow),
    pytest.param({"attention": faulty(raises)}, "triton", "packed", 600.0, id="kernels raise", marks=pytest.mark.slow),
    pytest.param({"attention": faulty(never)}, "triton", "packed", 10.0, id="kernels never return", marks=pytest.mark.slow),
    pytest.param({"capture": lambda: stale(2)}, "graphs", "triton", 600.0, id="graphs are stale"),
    pytest.param({"capture": lambda: never}, "graphs", "triton", 10.0, id="graphs never return", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("faults", "part", "attention", "seconds"), JOB_FAULTS)
def test_a_job_gives_correct_output_whatever_is_wrong_with_its_device(
    tiny_model_dir, want, monkeypatch, faults, part, attention, seconds
):
    with LLM(tiny_model_dir, device="cpu", compile="off") as llm:
        start = ThreadOfTrials(llm.engine.runner.model)
        start.model = replace(start.model, compile="auto")
    monkeypatch.setattr("batchgen.model.checks.device_check.check_device", partial(check_device, trial_seconds=seconds))
    use_fake_device(monkeypatch, **faults)
    check_as_on_a_gpu(monkeypatch, start)
    texts, attends, notes = job(tiny_model_dir)
    assert (texts, attends, len(notes)) == (want, attention, 0 if part is None else 1)
    assert all(f"Fake GPU: {PARTS[part]}: switched off, " in note for note in notes)
    assert job(tiny_model_dir) == (texts, attends, notes)
    assert len(start.started) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_part_passes_on_a_gpu(dtype):
    assert run_trials(prepare(build("llama").to("cuda", dtype))) == (list(PARTS), DONE)


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_a_gpu_gives_the_same_output_without_a_part_and_those_after_it(model, part):
    requests = make_requests([[*range(40), i] for i in range(5)], [20] * 5)
    want = token_ids(run(engine_for(model), requests))
    there = prepare(build("llama").to("cuda"))
    engine = engine_for(replace(there, verdict=Verdict("cuda:0", part, "a test")))
    assert engine.loop.ahead == 0
    assert engine.sampler.device.type == ("cpu" if part == "sampler" else "cuda")
    assert engine.attention == ("cascade" if part in ("sampler", "triton") else "triton")
    assert token_ids(run(engine, requests)) == want
