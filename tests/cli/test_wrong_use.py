"""Each kind of bad input: the exit code and the one line that the user sees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
Write = Callable[..., Path]


@pytest.fixture
def refused(cli: Cli, tiny_model_dir: Path) -> Callable[..., str]:
    """Runs the command with these arguments and the tiny model; its one line on standard error, after checking the rest."""

    def run(*arguments: str | Path, code: int = 2, model: Path | str = tiny_model_dir, command: str = "run") -> str:
        outcome = cli(command, "-m", model, *arguments)
        lines = outcome.err.splitlines()
        assert (outcome.code, outcome.out, len(lines)) == (code, "", 1), outcome
        assert lines[0].startswith("batchgen: error: ")
        return str(lines[0].removeprefix("batchgen: error: "))

    return run


def test_no_model(cli: Cli) -> None:
    outcome = cli("run", "x.jsonl")
    assert (outcome.code, outcome.err) == (
        2,
        "batchgen: error: missing option '--model' / '-m'; see batchgen run --help\n",
    )


def test_no_input(cli: Cli) -> None:
    outcome = cli("run", "-m", "x")
    assert outcome.code == 2
    assert outcome.err.startswith("batchgen: error: missing argument 'INPUT...")


def test_no_command(cli: Cli) -> None:
    outcome = cli()
    assert (outcome.code, outcome.err) == (2, "batchgen: error: missing command; see batchgen --help\n")


def test_an_unknown_command(cli: Cli) -> None:
    outcome = cli("generate")
    assert (outcome.code, outcome.err) == (2, "batchgen: error: no such command: generate; see batchgen --help\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--temp", "--template or --temperature"),
        ("--temprature", "--temperature"),
        ("--max-token", "--max-tokens"),
        ("--dtpe", "--dtype"),
        ("--output-fromat", "--output-format"),
    ],
)
def test_an_option_that_is_mistyped_is_told_what_was_meant(typed: str, meant: str, refused: Callable[..., str]) -> None:
    expected = f"no such option: {typed}; did you mean {meant}?; see batchgen run --help"
    assert refused("x.jsonl", typed, "1") == expected


def test_a_file_where_a_command_belongs_is_told_the_command(cli: Cli) -> None:
    outcome = cli("prompts.jsonl", "-m", "m")
    assert (outcome.code, outcome.err) == (
        2,
        "batchgen: error: no such command: prompts.jsonl; did you mean batchgen run prompts.jsonl?; see batchgen --help\n",
    )


def test_a_current_folder_that_was_deleted(
    refused: Callable[..., str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, rows = tmp_path / "gone", tmp_path / "rows.jsonl"
    gone.mkdir()
    rows.write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert refused(rows, "-o", tmp_path / "out.jsonl") == (
        "the current folder no longer exists; change to another one with cd"
    )
    assert cli("run", "--help").code == 0


def test_an_unknown_option(refused: Callable[..., str]) -> None:
    assert refused("x.jsonl", "--xyzzy", "1") == "no such option: --xyzzy; see batchgen run --help"


def test_a_number_that_is_none(refused: Callable[..., str]) -> None:
    assert refused("x.jsonl", "--max-tokens", "many") == "--max-tokens must be a whole number or auto, not 'many'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-tokens", "0"), "--max-tokens must be at least 1, not 0"),
        (("--max-tokens", "-5"), "--max-tokens must be at least 1, not -5"),
        (("--temperature", "-1"), "--temperature must be at least 0, not -1.0"),
        (("--temperature", "nan"), "--temperature must be a number, not nan"),
        (("--top-p", "0"), "--top-p must be above 0 and at most 1, not 0.0"),
        (("--min-p", "2"), "--min-p must be between 0 and 1, not 2.0"),
        (("--repetition-penalty", "0"), "--repetition-penalty must be above 0, not 0.0"),
        (("--stop", ""), "--stop must be texts that are not empty, not ''"),
        (("--stop-token-id", "-1"), "--stop-token-id must be token ids, not -1"),
        (("--dtype", "int8"), "--dtype must be auto, float32, bfloat16 or float16, not 'int8'"),
        (
            ("--device", "tpu"),
            "--device 'tpu' is unknown; use auto, cpu, mps, cuda, cuda:N or several as in cuda:0,1",
        ),
        (
            ("--device", "cuda:0,cpu"),
            "--device 'cuda:0,cpu' is unknown; use auto, cpu, mps, cuda, cuda:N or several as in cuda:0,1",
        ),
        (("--device", "mps:0,1"), "--device 'mps:0,1' is unknown; use auto, cpu, mps, cuda, cuda:N or several as in cuda:0,1"),
        (("--device", "cuda:1,0,01"), "--device cuda:1,0,01 names cuda:1 twice; name each device once"),
        (("--device", "cpu:0,1", "--device-map", "auto"), "--device-map chooses the devices itself; leave --device out"),
        (("--order", "random"), "--order must be input or done, not 'random'"),
        (
            ("--on-long-prompt", "drop"),
            "--on-long-prompt must be error, truncate-left or truncate-right, not 'drop'",
        ),
        (("--batch-size", "0"), "--batch-size must be at least 1, not 0"),
        (("--batch-size", "big"), "--batch-size must be a whole number or auto, not 'big'"),
        (("--max-batch-tokens", "1.5"), "--max-batch-tokens must be a whole number or auto, not '1.5'"),
        (("--max-prefill-tokens", "0"), "--max-prefill-tokens must be at least 1, not 0"),
        (("--chunk-size", "0"), "--chunk-size must be at least 1, not 0"),
        (("--window", "0"), "--window must be at least 1, not 0"),
        (("--limit", "-1"), "--limit must be at least 0, not -1"),
        (("--grace", "-1"), "--grace must be at least 0, not -1.0"),
        (("--flush-every", "-1"), "--flush-every must be at least 0, not -1.0"),
        (("--kv-memory", "lots"), "--kv-memory 'lots' is not a size; use auto, a size such as 8GiB, or a share such as 80%"),
        (("--max-errors", "x"), "--max-errors 'x' is not a limit; use a number of rows such as 10, or a share such as 5%"),
        (
            ("--chat-template-kwargs", "[1]"),
            """--chat-template-kwargs must be a JSON object, not [1]; use an object such as '{"enable_thinking": false}'""",
        ),
        (("--template", "nowhere.j2"), "--template nowhere.j2 cannot be read: No such file or directory; check the path"),
        (("--prefix", "@nowhere.txt"), "--prefix nowhere.txt cannot be read: No such file or directory; check the path"),
        (("--system", "@nowhere.txt"), "--system nowhere.txt cannot be read: No such file or directory; check the path"),
        (
            ("--input-format", "xml"),
            "--input-format must be jsonl, parquet, csv or tsv, not 'xml'",
        ),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_told_by_its_option(
    arguments: tuple[str, ...], message: str, refused: Callable[..., str], write_jsonl: Write
) -> None:
    assert refused(write_jsonl([{"prompt": "x"}]), *arguments) == message


def test_json_that_is_none(refused: Callable[..., str]) -> None:
    assert refused("x.jsonl", "--chat-template-kwargs", "{").startswith("--chat-template-kwargs is not JSON: ")


def test_a_template_that_is_not_text(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "t.j2"
    path.write_bytes(b"\xff\xfe")
    assert refused("x.jsonl", "--template", path) == f"--template {path} is not UTF-8 text; save it as UTF-8"


def test_a_missing_file(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert refused(path) == f"no such file: {path}; check the path"


def test_a_file_name_with_control_characters_is_escaped(refused: Callable[..., str], tmp_path: Path) -> None:
    assert (
        refused(tmp_path / "a\x1b]0;x\x07\n.jsonl")
        == f"no such file: {tmp_path}/a\\x1b]0;x\\x07\\n.jsonl; check the path"
    )


def test_a_missing_column(refused: Callable[..., str], write_jsonl: Write) -> None:
    source = write_jsonl([{"question": "x", "answer": "y"}])
    assert refused(source) == (
        "no row has a column 'prompt'; the input has 'question', 'answer'; "
        "name one with --prompt-column or --messages-column, or make the prompt with --template"
    )
    assert not source.with_name("prompts.out.jsonl").exists()
    assert not source.with_name("prompts.out.jsonl.job").exists()


def test_a_named_column_that_is_missing(refused: Callable[..., str], write_jsonl: Write) -> None:
    source = write_jsonl([{"prompt": "x"}])
    assert refused(source, "--prompt-column", "q") == (
        "no row has the column 'q' of --prompt-column; the input has 'prompt'"
    )


def test_a_system_message_without_a_chat_template(refused: Callable[..., str], write_jsonl: Write) -> None:
    message = refused(write_jsonl([{"prompt": "x"}]), "--system", "Be brief.")
    assert message.startswith("--system needs")
    assert "needs a chat template, and the model has none" in message


def test_a_stats_file_in_no_folder(refused: Callable[..., str], write_jsonl: Write, tmp_path: Path) -> None:
    path = tmp_path / "no" / "stats.json"
    message = refused(write_jsonl([{"prompt": "x"}]), "--stats", path)
    assert message == f"--stats {path} cannot be written; name a file in a folder that exists"


def test_an_unknown_model_folder(refused: Callable[..., str], write_jsonl: Write, tmp_path: Path) -> None:
    model = tmp_path / "no-model"
    assert refused(write_jsonl([{"prompt": "x"}]), model=model, code=1) == (
        f"model folder '{model}' does not exist; use a local folder with config.json and the tokenizer's files, "
        "or a hub name such as org/model"
    )


def test_a_folder_that_is_no_model(refused: Callable[..., str], write_jsonl: Write, tmp_path: Path) -> None:
    model = tmp_path / "empty"
    model.mkdir()
    assert refused(write_jsonl([{"prompt": "x"}]), model=model, code=1) == (
        f"model folder '{model}' is empty; give the folder that holds the model"
    )


def test_a_strangers_output(refused: Callable[..., str], write_jsonl: Write, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    assert refused(write_jsonl([{"prompt": "x"}]), "-o", output) == (
        f"{output} exists and has no job folder, so batchgen does not know whether it may replace it; "
        "use --overwrite to replace it, or another -o"
    )
    assert output.read_text() == "mine\n"


def test_an_output_that_is_also_the_input(refused: Callable[..., str], write_jsonl: Write) -> None:
    source = write_jsonl([{"prompt": "x"}])
    assert refused(source, "-o", source).startswith(f"{source} is both an input and the output; ")


def test_several_inputs_without_an_output(refused: Callable[..., str], write_jsonl: Write) -> None:
    a, b = write_jsonl([{"prompt": "x"}], "a.jsonl"), write_jsonl([{"prompt": "x"}], "b.jsonl")
    assert refused(a, b) == "several inputs need an output; name it with -o"


def test_kv_memory_for_not_one_block(refused: Callable[..., str], write_jsonl: Write) -> None:
    message = refused(write_jsonl([{"prompt": "x"}]), "--kv-memory", "1KiB", "--no-progress")
    assert message.startswith("--kv-memory 1KiB does not hold a block of ")


@pytest.mark.parametrize("command", ["run", "plan"])
def test_plan_refuses_as_run_does(command: str, refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert refused(path, command=command) == f"no such file: {path}; check the path"


def test_a_run_that_ended_before_its_first_result_binds_no_other(
    cli: Cli, refused: Callable[..., str], write_jsonl: Write, tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows, output = write_jsonl([{"prompt": "a"}]), tmp_path / "out.jsonl"
    first = cli("run", "-m", tiny_model_dir, rows, "-o", output, "--kv-memory", "1B")
    assert (first.code, first.err.splitlines()[-1]) == (
        2, "batchgen: error: --kv-memory 1B does not hold a block of 32 tokens (8.0 KiB); give 8KiB or more, or lower --chunk-size",
    )  # fmt: skip
    assert cli("run", "-m", tiny_model_dir, rows, "-o", output, "--max-tokens", "2").code == 0
    assert "was made with other settings: max_tokens was 2, is 3" in refused(rows, "-o", output, "--max-tokens", "3")
