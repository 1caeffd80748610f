"""Fixtures that every test may use: a tiny random Llama on disk, with and without a chat template."""

from __future__ import annotations

import os

# Before torch is imported by anyone: these models are so small that threads only cost.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import io
import json
import logging
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("batchgen", deadline=None)  # no test measures time
hypothesis.settings.load_profile("batchgen")

# Ignored under nohup, or in a shell's background, and so they would be in every run that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Triton's kernels run on its interpreter, on the CPU, but under `-m gpu`. It is decided when triton is imported, by whomever."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["TRITON_INTERPRET"] = "1"


BYTE_COUNT = 256
"""Ids 0..255 of the tiny tokenizer are the bytes of UTF-8 in the order of its alphabet; the special tokens follow."""
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, PAD_ID = BYTE_COUNT, BYTE_COUNT + 1, BYTE_COUNT + 2
CONTEXT_LENGTH = 512

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if not loop.last or add_generation_prompt or m.role != 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_tokenizer(folder: Path, *, chat: bool) -> None:
    """One token a byte, no merges; a prompt gets the begin token, as Llama's does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", BOS_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_tiny_llama(folder: Path, *, chat: bool = False, seed: int = 0, **config: Any) -> Path:
    """A random Llama (hidden 64, 2 layers) and its tokenizer. `initializer_range` keeps greedy margins far above float noise."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": BYTE_COUNT + len(SPECIAL_TOKENS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.1,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,
        "dtype": torch.float32,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | config))).eval()
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder, chat=chat)
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama in float32 with a byte tokenizer and no chat template (context: 512 tokens)."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-chat", chat=True)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (or raw lines) as JSON lines to a file in the test's folder."""

    def write(rows: Iterable[Mapping[str, Any] | str], name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs the command `batchgen` in this process: its exit code and both streams."""
    from batchgen_cli.app import main

    def run(*arguments: str | Path, stdin: str | None = None) -> Outcome:
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, out, err)

    return run


@pytest.fixture
def command() -> list[str]:
    """The command `batchgen` as a process of its own, for `subprocess`."""
    return [sys.executable, "-m", "batchgen_cli"]


@pytest.fixture
def command_environment() -> dict[str, str]:
    """The environment of such a process: it finds the packages of this checkout, installed or not."""
    root = Path(__file__).parents[1]
    paths = [str(root), str(root / "cli"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def read_jsonl() -> Callable[[Path], list[dict[str, Any]]]:
    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server that speaks S3, in a thread of this process."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An S3 store with an empty bucket called `bucket`: its fsspec file system. Child processes reach it too."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/moto-api/reset", method="POST")).close()
    fs = s3fs.S3FileSystem()  # one for all tests: to make it takes a second
    fs.invalidate_cache()
    fs.mkdir("bucket")
    return fs
