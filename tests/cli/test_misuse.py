"""Misuse gives one line and its exit code, before a tokenizer is loaded.

In arguments and messages, R is a file with one row, {"prompt": "x"}, and M a good model without a chat template. EMPTY is what an unset
variable of a shell becomes.
"""

import os
from pathlib import Path

import pytest

from batchgen.jobs.files.lease import Lease

RUN = "see batchgen run --help"
KWARGS = """use an object such as '{"enable_thinking": false}'"""
OUTPUT_OF = "name the output of a run, with the --work-dir of that run"
SIZE = "use auto, a size such as 8GiB, or a share such as 80%"


def make_files(folder: Path) -> None:
    """Writes the files that the cases name."""
    (folder / "rows.jsonl").write_text('{"prompt": "x"}\n')
    (folder / "questions.jsonl").write_text('{"question": "x", "answer": "y"}\n')
    (folder / "bodiless.jsonl").write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}\n')
    (folder / "mine.jsonl").write_text("mine\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "bad.j2").write_text("{{ prompt")
    (folder / "other.j2").write_text("{{ question }}")
    (folder / "good.j2").write_text("{{ prompt }}")
    (folder / "blank.txt").write_text(" \n\n")
    (folder / "schema.json").write_text('{"type": "strin"}')
    (folder / "list.json").write_text("[1]")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "astray.jsonl").symlink_to("gone/away.jsonl")
    (folder / "plain.jsonl.job").touch()
    (folder / "in-the-way.jsonl.job").mkdir()
    (folder / "in-the-way.jsonl.job" / "notes.txt").write_text("mine")


def unknown(option: str, *meant: str) -> str:
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return f"no such option: {option}{hint}; {RUN}"


MISUSES: list[tuple[str, int, str]] = [
    # the command itself
    ("", 2, "missing command; see batchgen --help"),
    ("generate", 2, "no such command: generate; see batchgen --help"),
    ("rn R -m M", 2, "no such command: rn; did you mean run?; see batchgen --help"),
    ("rows.jsonl -m M", 2, "no such command: rows.jsonl; did you mean batchgen run rows.jsonl?; see batchgen --help"),
    ("run -m M", 2, f"missing argument 'INPUT...'; {RUN}"),
    ("run R", 2, f"missing option '--model' / '-m'; {RUN}"),
    ("plan R", 2, "missing option '--model' / '-m'; see batchgen plan --help"),
    ("status", 2, "missing argument 'OUTPUT'; see batchgen status --help"),
    ("status R --follow", 2, "no such option: --follow; see batchgen status --help"),
    ("run R -m M --xyzzy", 2, unknown("--xyzzy")),
    ("run R -m M --temp 1", 2, unknown("--temp", "--template", "--temperature")),
    ("run R -m M --temprature 1", 2, unknown("--temprature", "--temperature")),
    ("run R -m M --max_tokens 5", 2, unknown("--max_tokens", "--max-tokens")),
    ("run R -m M --out o.jsonl", 2, unknown("--out", "--output", "--output-format")),
    ("run R -m M --max-tokens", 2, f"option '--max-tokens' requires an argument; {RUN}"),
    # values: what a sampling parameter may be is in `test_sampling_params.py`
    ("run R -m M --max-tokens many", 2, "--max-tokens must be a whole number or auto, not 'many'"),
    ("run R -m M --temperature -1", 2, "--temperature must be at least 0, not -1.0"),
    ("run R -m M --choices yes", 2, "--choices must be two or more different texts, not 'yes'"),
    ("run R -m M --choices [\"a\"", 2, "--choices must be separated by commas, or a JSON list: Expecting ',' delimiter: line 1 column 5 (char 4)"),
    ("run R -m M --score --choices a,b", 2, "--score cannot be combined with --choices; leave one of them out"),
    ("run R -m M --choices [\"a\",1]", 2, "--choices must be texts, and one is 1: put it in quotes"),
    ("run R -m M --choices @nowhere.txt", 2, "--choices nowhere.txt cannot be read: No such file or directory; check the path"),
    ("run R -m M --choices []", 2, "--choices [] has no labels; give two or more different texts"),
    ("run R -m M --choices @blank.txt", 2, "--choices @blank.txt has no labels; give two or more different texts"),
    ("run R -m M --choices @list.json", 2, "--choices must be texts, and one is 1: put it in quotes"),
    ("run R -m M --choices-column prompt -n 2", 2, "--choices-column cannot be combined with --n; leave one of them out"),
    ("run R -m M --expect nr", 2, "no row has the column 'nr' of --expect; the input has 'prompt'"),
    ("run R -m M --top-choices 3", 2, "--top-choices is for labels; add --choices or --choices-column, or leave it out"),
    ("run R -m M --regex a(", 2, "--regex cannot be used: unclosed group"),
    ("run R -m M --regex (?=a)b", 2, "--regex cannot be used: look-around, including look-ahead and look-behind, is not supported"),
    ("run R -m M --json-schema {}", 2, "--json-schema takes a file, not the schema itself; write it to a file: --json-schema schema.json"),
    ("run R -m M --json-schema bad.j2", 2, "--json-schema bad.j2 is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); correct the file"),
    ("run R -m M --json-schema list.json", 2, """--json-schema list.json must hold a JSON object; give one such as {"type": "object"}"""),
    ("run R -m M --json-schema schema.json", 2, "--json-schema cannot be used: Invalid type: strin"),
    ("run R -m M --parse json", 2, "--parse json is for texts of --json-schema; add --json-schema FILE"),
    ("run R -m M --dtype int8", 2, "--dtype must be auto, float32, bfloat16 or float16, not 'int8'"),
    ("run R -m M --device tpu", 2, "--device 'tpu' is unknown; use auto, cpu, mps, cuda, cuda:N or several as in cuda:0,1"),
    ("run R -m M --device cuda:1,1", 2, "--device cuda:1,1 names cuda:1 twice; name each device once"),
    ("run R -m M --device cpu --device-map auto", 2, "--device-map chooses the devices itself; leave --device out"),
    ("run R -m M --device-map balanced", 2, "--device-map must be auto, not 'balanced'"),
    ("run R -m M --workers 4", 2, "--workers, --cpus-per-worker and --ray-working-dir are for a cluster; add --ray, or use --device"),
    ("run R -m M --ray --device cuda:0,1", 2, "with --ray the cluster chooses the devices; use --device cpu or cuda, or leave it out"),
    ("run R -m M --batch-size big", 2, "--batch-size must be a whole number or auto, not 'big'"),
    ("run R -m M --kv-memory lots", 2, f"--kv-memory 'lots' is not a size; {SIZE}"),
    ("run - -m M -o o.jsonl --window all", 2, "--window all reads the input twice, which <stdin> does not allow; use --window ROWS, or a file"),
    ("run R -m M -o - --window all", 2, "--window all writes no row before all rows are done; name an output with -o"),
    ("run R -m M --window all --order done", 2, "--window all cannot be combined with --order done; use --window ROWS"),
    ("run R -m M --weight-memory much", 2, "--weight-memory 'much' is not a size; use a size such as 8GiB"),
    ("run R -m M --weight-memory 80%", 2, "--weight-memory '80%' is not a size; use a size such as 8GiB"),
    ("run R -m M --window some", 2, "--window must be a number of rows or all, not 'some'"),
    ("plan R -m M --shards 0", 2, "--shards must be at least 1, not 0"),
    ("plan R -m M --measure 0", 2, "--measure must be at least 1, not 0"),
    ("plan - -m M --measure", 2, "--measure keeps the results for the run, so it needs an input that can be read again, and an output file; use a file, and -o FILE"),
    ("plan R -m M --measure 4 --shard 1/2", 2, "--measure is for a whole job, not for a shard; leave out --shard"),
    ("run R -m M --expect prompt --score", 2, "--expect compares texts, and --score writes none; leave one of them out"),
    ("run R -m M --expect prompt --embed", 2, "--expect compares texts, and --embed writes none; leave one of them out"),
    ("run R -m M --push-public", 2, "--push-public is for --push; name the dataset with --push"),
    ("run R -m M --limit -1", 2, "--limit must be at least 0, not -1"),
    ("run R -m M --max-errors x", 2, "--max-errors 'x' is not a limit; use a number of rows such as 10, or a share such as 5%"),
    ("run R -m M --grace -1", 2, "--grace must be at least 0, not -1.0"),
    ("run R -m M --order random", 2, "--order must be input or done, not 'random'"),
    ("run R -m M --input-format xml", 2, "--input-format must be jsonl, parquet, csv or tsv, not 'xml'"),
    ("run R -m M --encoding base64", 2, "--encoding must be the name of a text encoding, such as cp1252, utf-16 or shift_jis, not 'base64'"),
    ("run R -m M --output-format csv", 2, "--output-format must be rows or openai, not 'csv'"),
    ("run R -m M --output-format openai --score", 2, "--output-format openai cannot hold scores; leave out one of --output-format and --score"),
    # options that do not go together
    ("run R -m M --embed --classify", 2, "--embed and --classify cannot be combined; leave one of them out"),
    ("run R -m M --classify --output-format openai", 2, "--output-format openai cannot hold classes; leave out one of --output-format and --classify"),
    ("run R -m M --embed --score", 2, "--embed cannot be combined with --score; leave one of them out"),
    ("run R -m M --embed --choices a,b", 2, "--embed cannot be combined with --choices; leave one of them out"),
    ("run R -m M --embed --quantize int8", 2, "--quantize is for models that write text, not for --embed; leave it out"),
    ("run R -m M --weight-memory 1GiB --weights resident", 2, "--weight-memory is for streamed weights; leave out --weights resident"),
    ("run R -m M --quantize int8 --weights streamed", 2, "--quantize int8 needs all weights in memory; leave out --weights streamed"),
    ("run R -m M --quantize int8 --weight-memory 1GiB", 2, "--quantize int8 needs all weights in memory; leave out --weight-memory"),
    ("run R -m M --quantize int8 --compile off", 2, "--quantize int8 needs batchgen's own kernels; leave out --compile off"),
    ("run R -m M --pooling mean", 2, "--pooling and --normalize are for --embed; add --embed, or leave them out"),
    ("run R -m M --prompt-name query", 2, "--prompt-name is for --embed; add --embed, or use --prefix"),
    ("run R -m M --embed --prompt-name query --prefix x", 2, "--prompt-name cannot be combined with --prefix; leave one of them out"),
    ("run R -m M --prompt-logprobs --choices a,b", 2, "--prompt-logprobs cannot be combined with --choices; leave one of them out"),
    ("run R -m M --prompt-logprobs --output-format openai", 2, "--output-format openai cannot hold log-probabilities of prompts; leave out one of --output-format and --prompt-logprobs"),
    ("run R -m M --shard 0/4", 2, "--shard '0/4' is not a part of a job; use 1/4, 2/4, 3/4 and 4/4 for four"),
    ("run R -m M --shard 1/4 --overwrite", 2, "--overwrite would delete the work of the other shards; delete the output and its .job folder instead"),
    ("run R -m M --shard 1/4 --order done", 2, "--shard cuts the prefix order of the whole input; leave out --window and --order done"),
    ("run - -m M -o o.jsonl --shard 1/2", 2, "--shard reads the input twice, which <stdin> does not allow; use a file"),
    ("run R -m M --shard 1/2 -o -", 2, "--shard writes no row before all rows are done; name an output with -o"),
    ("run R -m M --merge", 2, "--merge is for a run with --shard; name the shard, or use batchgen merge OUTPUT"),
    # prompts
    ("run R -m M --template nowhere.j2", 2, "--template nowhere.j2 cannot be read: No such file or directory; check the path"),
    ("run R -m M --template {{prompt}}", 2, "--template takes a file, not the template itself; write it to a file: --template FILE"),
    ("run R -m M --system latin.txt", 2, "--system latin.txt is the name of a file; write --system @latin.txt for the text in it"),
    ("plan R -m M --write-template best.j2", 2, "--write-template is for a job with a template; name one with --template"),
    ("plan R -m M --template good.j2 --write-template good.j2", 2, "--write-template good.j2 holds the job's template already; name another file"),
    ("plan R -m M --template good.j2 --write-template rows.jsonl", 2, "--write-template rows.jsonl would replace rows.jsonl, which the job needs; name another file"),
    ("plan R -m M --template good.j2 --write-template no/best.j2", 2, "--write-template no/best.j2 cannot be written; name a file in a folder that exists"),
    ("run R -m M --template latin.txt", 2, "--template latin.txt is not UTF-8 text; save it as UTF-8"),
    ("run R -m M --template other.j2", 2, "no row has the column 'question' of --template; the input has 'prompt'"),
    ("run R -m M --system @nowhere.txt", 2, "--system nowhere.txt cannot be read: No such file or directory; check the path"),
    ("run R -m M --system Hello", 2, "--system needs a chat template, and the model has none; use --chat-template FILE, or --no-chat for raw prompts"),
    ("run R -m M --chat-template-kwargs [1]", 2, f"--chat-template-kwargs must be a JSON object, not [1]; {KWARGS}"),
    ("run R -m M --on-long-prompt drop", 2, "--on-long-prompt must be error, truncate-left or truncate-right, not 'drop'"),
    ("run questions.jsonl -m M", 2, "no row has a column 'prompt'; the input has 'question', 'answer'; "
        "name one with --prompt-column or --messages-column, or make the prompt with --template"),
    ("run bodiless.jsonl -m M", 2, "no row has a body that is an object, as requests of the OpenAI Batch form have; "
        "the input has 'custom_id', 'method', 'url'; a body is, for example, {\"messages\": […]}"),
    ("run R -m M --score", 2, "no row has the column 'completion' of --score; the input has 'prompt'"),
    ("run R -m M --keep nr", 2, "no row has the column 'nr' of --keep; the input has 'prompt'"),
    # files
    ("run 123456 -m M", 2, "no such file: 123456; check the path"),
    ("run a\x1b]0;x\x07.jsonl -m M", 2, "no such file: a\\x1b]0;x\\x07.jsonl; check the path"),
    ("run R -m M -o mine.jsonl", 2, "mine.jsonl exists and has no job folder, so batchgen does not know whether it may replace it; use the --work-dir of its run if it had one, --overwrite to replace it, or another -o"),
    ("run R -m M -o out", 2, "the output out has an unknown suffix; use .jsonl, .csv, .tsv (or one of them with .gz or .zst) or .parquet, or - for standard output"),
    ("run R -m M -o o.parquet.gz", 2, "the output o.parquet.gz would be compressed twice; Parquet is compressed inside: leave the suffix out"),
    ("run R -m M -o folder", 2, "the output folder is a folder; name a file in it"),
    ("run R -m M -o loop.jsonl", 2, "the output loop.jsonl is a link that leads back to itself; remove it, or name a file"),
    ("run R -m M -o astray.jsonl", 2, "the output astray.jsonl is a link to gone/away.jsonl, whose folder does not exist; check the link"),
    ("run R -m M -o pipe.jsonl", 2, "the output pipe.jsonl is a pipe or a device, which a file would replace; write rows to it with -o - > pipe.jsonl"),
    ("run R -m M -o pipe.jsonl --overwrite", 2, "the output pipe.jsonl is a pipe or a device, which a file would replace; write rows to it with -o - > pipe.jsonl"),
    ("run R -m M -o no/out.jsonl", 2, "there is no folder no to write to; create it with mkdir -p no"),
    ("run R -m M -o mine.jsonl/no/out.jsonl", 2, "there is no folder mine.jsonl/no to write to; mine.jsonl is a file: use another place"),
    ("run R -m M -o in-the-way.jsonl", 2, "in-the-way.jsonl.job exists and is not a job's folder; move it, or use another -o"),
    ("run R -m M --stats no/s.json", 2, "--stats no/s.json cannot be written; name a file in a folder that exists"),
    ("run R -m M --report r.txt", 2, "--report r.txt is not the name of a page; name a file that ends in .html"),
    ("run R -m M --report r.html -o -", 2, "--report is for a job with an output file: standard output keeps nothing; name one with -o"),
    ("status no.jsonl", 2, f"there is no job of no.jsonl: neither no.jsonl nor no.jsonl.job exists; {OUTPUT_OF}"),
    ("status in-the-way.jsonl", 2, f"there is no job of in-the-way.jsonl: in-the-way.jsonl.job is not a job's folder; {OUTPUT_OF}"),
    ("status plain.jsonl", 2, f"there is no job of plain.jsonl: plain.jsonl.job is not a job's folder; {OUTPUT_OF}"),
    ("status mine.jsonl", 2, f"there is no job of mine.jsonl: mine.jsonl.job does not exist; {OUTPUT_OF}"),
    ("status folder", 2, f"there is no job of folder: folder is a folder; {OUTPUT_OF}"),
    ("status -", 2, "a job that writes to standard output stores no progress; name an output file"),
    ("report no.jsonl", 2, f"there is no job of no.jsonl: neither no.jsonl nor no.jsonl.job exists; {OUTPUT_OF}"),
    ("report R", 2, "rows.jsonl has no rows of batchgen's, and no job's folder; name the output of a run"),
    # empty names
    ("run EMPTY -m M -o o.jsonl", 2, "an input has an empty name; name a file, a folder, a glob or - for standard input"),
    ("run R -m EMPTY", 2, "--model must be a name that is not empty, not ''"),
    ("run R -m M -o EMPTY", 2, "--output must be a name that is not empty, not ''"),
    ("run R -m M --work-dir EMPTY", 2, "--work-dir must be a name that is not empty, not ''"),
    ("run R -m M --lora EMPTY", 2, "--lora must be a name that is not empty, not ''"),
    ("run R -m M --template EMPTY", 2, "--template must name a file, not ''"),
    ("run R -m M --keep EMPTY", 2, "--keep must be all, none or names of columns, not ''"),
    ("run R -m M --system @", 2, "--system must name a file, not ''"),
    ("report EMPTY", 2, "'' is not the name of an output; name the output of a run"),
    # models
    ("run R -m nowhere/", 1, "model folder 'nowhere/' does not exist; use a local folder with config.json and the tokenizer's files, or a hub name such as org/model"),
    ("plan R -m M --lora nowhere/", 1, "there is no adapter folder 'nowhere/'; give a folder, or a hub name such as org/adapter"),
    ("run R -m rows.jsonl", 1, "model 'rows.jsonl' is a file; give the folder that holds config.json, the weights and the tokenizer's files"),
    ("run R -m M --revision v1", 1, "--revision 'v1' names a revision on the hub, and 'MODEL' is a local folder; leave --revision out"),
]  # fmt: skip
"""Command line, exit code, message."""


@pytest.mark.parametrize(("line", "code", "message"), MISUSES, ids=[line for line, _, _ in MISUSES])
def test_misuse_is_told_in_one_line_before_a_tokenizer_is_loaded(
    line, code, message, cli, tiny_model_dir, tmp_path, monkeypatch
):
    def load_tokenizer(config: object) -> None:
        raise AssertionError("a tokenizer is being loaded")

    monkeypatch.setattr("batchgen.job_setup.load_tokenizer", load_tokenizer)
    make_files(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    names = {"R": "rows.jsonl", "M": str(tiny_model_dir), "EMPTY": ""}
    outcome = cli(*(names.get(word, word) for word in line.split()))
    assert (outcome.code, outcome.out) == (code, ""), outcome
    said = outcome.err.removeprefix("batchgen: error: ")
    expected = message.replace("MODEL", str(tiny_model_dir))
    assert said == f"{expected}\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_held_output_is_told_before_a_tokenizer_is_loaded(cli, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.job_setup.load_tokenizer", None)
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    claims = tmp_path / "o.jsonl.job" / "claims"
    claims.parent.mkdir()
    lease = Lease(claims, "o.jsonl")
    outcome = cli("run", "rows.jsonl", "-m", tiny_model_dir, "-o", "o.jsonl")
    lease.release()
    assert (outcome.code, outcome.out) == (75, "")
    assert outcome.err.startswith(f"batchgen: error: another run holds o.jsonl (process {os.getpid()} on ")
    assert len(list(claims.iterdir())) == 1


@pytest.mark.parametrize("output", ["/nowhere/out.jsonl", "out.jsonl"])
def test_a_current_folder_that_was_deleted_is_named(output, cli, tiny_model_dir, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    make_files(tmp_path)
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused = cli("run", tmp_path / "rows.jsonl", "-m", tiny_model_dir, "-o", output)
    assert (refused.code, refused.err) == (
        2, "batchgen: error: the current folder no longer exists; change to another one with cd\n",
    )  # fmt: skip
    assert cli("run", "--help").code == 0


def test_a_run_that_ended_before_its_first_result_binds_no_other(cli, write_jsonl, tiny_model_dir, tmp_path):
    run = ("run", "-m", tiny_model_dir, write_jsonl([{"prompt": "a"}]), "-o", tmp_path / "out.jsonl")
    first = cli(*run, "--kv-memory", "1B")
    assert (first.code, first.err.splitlines()[-1]) == (
        2, "batchgen: error: --kv-memory 1B does not hold a block of 32 tokens (8.0 KiB); give 8KiB or more, or lower --chunk-size",
    )  # fmt: skip
    assert cli(*run, "--max-tokens", "2").code == 0
    assert "was made with other settings: max_tokens was 2, is 3" in cli(*run, "--max-tokens", "3").err
