"""How the texts of options become values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from batchgen.config import JobConfig, ModelConfig
from batchgen.errors import UsageError
from batchgen.options import json_object, json_schema_file, text_or_file
from batchgen_cli.app import app
from batchgen_cli.options import job_config


def parsed(*arguments: str) -> JobConfig:
    """Returns the job that these options ask for."""
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    with run.make_context("run", ["x.jsonl", "-m", "m", *arguments]) as ctx:
        return job_config(ctx.params)


def test_what_is_not_given_is_the_default() -> None:
    assert parsed() == JobConfig(inputs=("x.jsonl",), model=ModelConfig(model="m"))


def test_keep_is_all_none_or_a_list() -> None:
    assert parsed("--keep", "all").keep is None
    assert parsed("--keep", "none").keep == ()
    assert parsed("--keep", "a,b c,").keep == ("a", "b c")


def test_columns_are_separated_by_commas() -> None:
    assert parsed("--row-params", "a,b").prompts.row_params == ("a", "b")


def test_auto_is_no_number() -> None:
    assert parsed("--batch-size", "auto").engine.batch_size is None
    assert parsed("--batch-size", "12").engine.batch_size == 12
    with pytest.raises(UsageError, match="--batch-size must be a whole number or auto, not '1x'"):
        parsed("--batch-size", "1x")


def test_a_switch_has_two_ends() -> None:
    assert [parsed(*given).prompts.chat for given in ((), ("--chat",), ("--no-chat",))] == [None, True, False]
    assert [parsed(*given).engine.share for given in ((), ("--share",), ("--no-share",))] == [True, True, False]


def test_a_window_is_rows_or_all() -> None:
    assert [parsed(*given).window for given in ((), ("--window", "all"), ("--window", "7"))] == [None, "all", 7]
    with pytest.raises(UsageError, match="--window must be a number of rows or all, not '1x'"):
        parsed("--window", "1x")


def test_stops_repeat() -> None:
    sampling = parsed("--stop", "a", "--stop", "b", "--stop-token-id", "5").sampling
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (5,))


def test_a_text_is_taken_to_the_letter_unless_it_names_a_file() -> None:
    assert text_or_file("--prefix", "a@b\\n") == "a@b\\n"


def test_json_is_an_object() -> None:
    assert json_object("--chat-template-kwargs", '{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A,B,C", ("A", "B", "C")),
        (" very good, bad ", ("very good", "bad")),
        ('["a, b", " c"]', ("a, b", " c")),
    ],
)
def test_choices_are_separated_by_commas_or_a_json_list_taken_to_the_letter(text: str, found: tuple[str, ...]) -> None:
    assert parsed("--choices", text).sampling.choices == found


def test_a_list_of_choices_that_is_not_json_is_wrong_use() -> None:
    with pytest.raises(UsageError, match=r"--choices must be separated by commas, or a JSON list: Expecting value"):
        parsed("--choices", "[a, b]")


def test_a_schema_is_that_of_its_file_blanks_apart(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{\n "type": "object",  "properties": {"b": {}, "a": {}}}\n')
    assert json_schema_file("--json-schema", path) == '{"type": "object", "properties": {"b": {}, "a": {}}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{a",
            "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); correct the file",
        ),
        ("\ufeff", "is not JSON: Expecting value: line 1 column 1 (char 0); correct the file"),
        ("", "is not JSON: Expecting value: line 1 column 1 (char 0); correct the file"),
        ("[1]", 'must hold a JSON object; give one such as {"type": "object"}'),
    ],
)
def test_a_schema_that_is_none_is_wrong_use(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(UsageError) as e:
        json_schema_file("--json-schema", path)
    assert str(e.value) == f"--json-schema {path} {message}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0"), "--n must be between 1 and 1024, not 0"),
        (("--stop-token-id", "-1"), "--stop-token-id must be token ids, not -1"),
        (("--choices", "a"), "--choices must be two or more different texts, not 'a'"),
        (("--choices", "a,,b"), "--choices must be texts that are not empty, not 'a', '', 'b'"),
        (("--choices", "a,b", "-n", "2"), "--choices cannot be combined with --n"),
        (("--regex", "a", "--stop", "b"), "--regex cannot be combined with --stop"),
        (("--regex", "a", "--ignore-eos"), "--regex cannot be combined with --ignore-eos"),
        (("--regex", ""), "--regex must be text that is not empty, not ''"),
    ],
)
def test_parameters_that_do_not_go_are_told_by_their_options(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as e:
        parsed(*arguments)
    assert str(e.value) == message


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (["--ray"], "auto"),
        (["--ray", "rows.jsonl"], "auto"),
        (["--ray", "--limit", "3"], "auto"),
        (["--ray", "head:6379"], "head:6379"),
        (["--ray", "ray://head:10001"], "ray://head:10001"),
        (["--ray", "local"], "local"),
        (["--ray=10.0.0.1:6379"], "10.0.0.1:6379"),
    ],
)
def test_the_address_of_a_cluster_may_be_left_out(given: list[str], address: str) -> None:
    from batchgen_cli.app import _with_ray_address

    taken = _with_ray_address(given)
    joined = dict(zip(taken, [*taken[1:], ""], strict=True)).get("--ray") or taken[0].partition("=")[2]
    assert joined == address


def test_without_the_package_ray_says_how_to_install_it(
    cli: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.preflight.find_spec", lambda name: None)
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    outcome = cli("run", tmp_path / "in.jsonl", "-m", tiny_model_dir, "--ray")
    assert (outcome.code, outcome.err) == (
        2,
        "batchgen: error: --ray needs the package ray; install it with pip install 'batchgen-llm[ray]'\n",
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 4}, "--workers, --cpus-per-worker and --ray-working-dir are for a cluster"),
        ({"ray": "auto", "device": "cuda:0,1"}, "with --ray the cluster chooses the devices"),
        ({"ray": "auto", "workers": 0}, "--workers must be at least 1"),
    ],
)
def test_options_of_a_cluster_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ModelConfig(model="m", **options)


def test_an_option_that_is_not_given_does_not_count_as_given() -> None:
    assert parsed("--seed", "3").sampling.given == ("seed",)


@pytest.mark.parametrize("option", ["--output", "--stats", "--report"])
def test_an_empty_name_as_of_an_unset_variable_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option} must be a name that is not empty, not ''"):
        parsed(option, "")
