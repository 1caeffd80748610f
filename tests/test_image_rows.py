"""Jobs whose rows have images: every form of input, resume, spool on disk, several devices, shards, faults, figures."""

import base64
import io
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from batchgen import (
    LLM,
    EngineConfig,
    JobConfig,
    JobReport,
    ModelConfig,
    PromptConfig,
    SamplingParams,
    merge_job,
    report_job,
    run_job,
)
from batchgen.config import InputLimits
from batchgen.dry_run import plan_job
from batchgen.errors import Interrupted, UsageError
from batchgen.model.vision import Vision
from batchgen.result import Result
from support.models import load_once
from support.params import slow_but
from support.progress import Recorder, interrupt, rows_done
from support.records import json_rows
from support.runs import FINISHED_FILES
from support.vision import FAMILIES, Reference, make, picture

# Of transformers' processor for GLM 4V.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
TOKENS = 8
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
Rows = list[dict[str, Any]]
TINY = InputLimits(read_rows=3, run_rows=3, window_leaves=3, batch_rows=2)
"""Windows of three rows and several files of sorted requests, like a job of millions of rows."""


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    name = getattr(request, "param", "llava")
    folder = tmp_path_factory.mktemp("models")
    return make(name, folder), folder


@pytest.fixture
def model(reference: tuple[Reference, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    load_once(monkeypatch, reference[1])
    Path("p").mkdir()
    for i in range(4):
        picture(i, 60 + 10 * i, 60).save(f"p/{i}.png")
    return reference[1]


def data_url(i: int) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(f"p/{i}.png").read_bytes()).decode()


QUESTIONS = ("What is this?", "What is that?", "How many?")


def rows() -> Rows:
    """Four pictures with three questions each, in an order that mixes them, and a row of text."""
    found = [
        {"id": f"{i}-{n}", "messages": [{"role": "user", "content": [{"type": "image", "path": f"p/{i}.png"}, {"type": "text", "text": QUESTIONS[n]}]}]}
        for n in range(3)
        for i in range(4)
    ]  # fmt: skip
    return [*found, {"id": "text", "messages": [{"role": "user", "content": "Who are you?"}]}]


def write(found: Rows, name: str = "in.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in found))


def config_of(model: Path, **options: Any) -> JobConfig:
    return JobConfig(
        **{
            "inputs": "in.jsonl", "output": "o.jsonl", "model": ModelConfig(model=str(model), device="cpu", dtype="float32"),
            "sampling": PARAMS, "token_ids": True, "engine": EngineConfig(kv_memory="64MiB", debug=True),
        } | options
    )  # fmt: skip


def run(model: Path, **options: Any) -> JobReport:
    return run_job(config_of(model, **options))


def answers(name: str = "o.jsonl") -> list[Any]:
    return [row["token_ids"] for row in json_rows(name)]


@pytest.fixture(scope="module")
def expected(reference: tuple[Reference, Path]) -> list[list[int]]:
    whole = reference[0]
    found = []
    for n in range(3):
        for i in range(4):
            content = [{"type": "image"}, {"type": "text", "text": QUESTIONS[n]}]
            found.append(
                whole.generate([{"role": "user", "content": content}], [picture(i, 60 + 10 * i, 60)], TOKENS)[1]
            )
    return [*found, whole.generate([{"role": "user", "content": "Who are you?"}], [], TOKENS)[1]]


@pytest.fixture(scope="module")
def llm(reference: tuple[Reference, Path]) -> Iterator[LLM]:
    engine = EngineConfig(kv_memory="64MiB", debug=True)
    with LLM(str(reference[1]), device="cpu", dtype="float32", engine=engine) as llm:
        yield llm


@pytest.fixture
def ask(llm: LLM, model: Path) -> Callable[..., Result]:
    """Returns the result of one row, with these options of `PromptConfig`."""
    return lambda row, **options: llm.generate([row], PARAMS, prompt_options=PromptConfig(**options))[0]


def test_a_job_encodes_each_image_once_and_says_so(model, expected):
    write(rows())
    stats = run(model).stats
    assert answers() == expected
    figures = ("rows_ok", "images", "images_encoded", "image_tokens")
    assert {name: stats[name] for name in figures} == {
        "rows_ok": 13, "images": 12, "images_encoded": 4, "image_tokens": 12 * 16,
    }  # fmt: skip
    assert stats["prefill_tokens"] == stats["prefill_tokens_min"]
    assert sorted(path.name for path in Path("o.jsonl.job").iterdir()) == FINISHED_FILES


def stop_after_four_rows(model: Path) -> None:
    """Stops a job that keeps images, and sorted requests on the disk."""
    sent = rows()
    for i in (1, 5):
        sent[i]["messages"][0]["content"][0] = {"type": "image_url", "image_url": {"url": data_url(1)}}
    write(sent)
    with pytest.raises(Interrupted):
        run_job(config_of(model, limits=TINY), Recorder(rows_done(4), interrupt))


@pytest.mark.parametrize("reference", slow_but(["llava"], sorted(FAMILIES)), indirect=True)
def test_a_stopped_job_goes_on_with_sorted_requests_on_the_disk(model, expected):
    stop_after_four_rows(model)
    assert [path.name for path in Path("o.jsonl.job/images").iterdir()] != []
    Path("p/3.png").touch()
    stats = run(model, limits=TINY).stats
    assert answers() == expected
    assert stats["rows_resumed"] >= 4
    assert not Path("o.jsonl.job/images").exists()


def test_a_stopped_job_whose_folder_was_moved_finds_the_images_that_it_keeps(model, expected):
    stop_after_four_rows(model)
    Path("elsewhere").mkdir()
    Path("o.jsonl.job").rename("elsewhere/o.jsonl.job")
    stats = run(model, output="elsewhere/o.jsonl", limits=TINY).stats
    assert answers("elsewhere/o.jsonl") == expected
    assert stats["rows_resumed"] >= 4


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of four images at URLs, whenever one of them is fetched."""
    names: list[str] = []
    cat_file = MemoryFileSystem.cat_file

    def counted(self: MemoryFileSystem, path: str, **options: Any) -> bytes:
        names.append(path)
        return bytes(cat_file(self, path, **options))

    for i in range(4):
        MemoryFileSystem().pipe_file(f"/{i}.png", Path(f"p/{i}.png").read_bytes())
    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    return names


@pytest.mark.parametrize("way", ["plan", "standard output", "a run that ends with advice"])
def test_the_image_of_a_url_is_fetched_once_also_if_that_fails_unless_rows_come_from_a_pipe(way, model, fetched):
    write(
        [
            {"prompt": f"{i * 7919:06} is read now, and what does it show?", "page": f"memory://{i % 5}.png"}
            for i in range(256)
        ]
    )
    template = "{{ prompt }}{{ page }}" + "Be strict and say only what you see. " * 2
    prompts = PromptConfig(image_column=("page",), template=template)
    config = config_of(model, prompts=prompts, sampling=SamplingParams(max_tokens=1), limits=InputLimits(read_rows=100))
    notes = Recorder()
    if way == "plan":
        assert plan_job(config).advice is not None
    else:
        run_job(replace(config, output="-", window=100) if way == "standard output" else config, notes)
    times = 3 if way == "standard output" else 1  # windows of 100 rows
    assert sorted(fetched) == [f"/{i}.png" for i in range(4)] + ["/4.png"] * times
    if way == "a run that ends with advice":
        assert [note for note in notes.notes if "put what rows have in common before what differs" in note] != []
        assert sorted(path.name for path in Path("o.jsonl.job").iterdir()) == FINISHED_FILES


@pytest.mark.usefixtures("model")
def test_a_loaded_model_fetches_an_image_again_in_its_next_call(ask, fetched):
    row = {"prompt": QUESTIONS[0], "page": "memory://0.png"}
    assert [ask(row, image_column=("page",)).failed for _ in range(2)] == [False, False]
    assert fetched == ["/0.png"] * 2


@pytest.mark.usefixtures("model")
def test_a_loaded_model_is_shown_images_of_pillow(llm, expected):
    def about(shown: Any) -> Rows:
        return [
            {"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": QUESTIONS[0]}]}
        ]

    turned = picture(1, 70, 60).transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6
    results = llm.generate([about(picture(0)), about("p/1.png"), about(turned)], PARAMS)
    assert [list(result.token_ids) for result in results] == [expected[0], expected[1], expected[1]]


@pytest.mark.parametrize("row", [{"image": picture(0)}, {"multi_modal_data": {"image": picture(0)}}])
def test_an_image_beside_a_prompt_of_a_loaded_model_that_is_not_shown_gives_a_warning(row, llm):
    name = next(iter(row))
    with pytest.warns(
        UserWarning, match=rf"^prompts have '{name}', which the model is not shown: put images into messages, or "
    ):
        llm.generate([{"prompt": QUESTIONS[0], **row}], PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = PromptConfig(image_column=("image",))
        llm.generate([{"prompt": QUESTIONS[0], "image": picture(0)}], PARAMS, prompt_options=shown)
        llm.generate([{"prompt": QUESTIONS[0], "image": None}], PARAMS)


@pytest.mark.usefixtures("model")
def test_an_image_that_was_missing_for_a_while_is_shown_in_the_next_call(llm, expected):
    content = [{"type": "image", "path": "p/0.png"}, {"type": "text", "text": QUESTIONS[0]}]
    conversation, results = [{"role": "user", "content": content}], []
    llm.add([conversation, conversation], PARAMS, on_result=results.append)
    Path("p/0.png").rename("p/away.png")
    llm.run()
    Path("p/away.png").rename("p/0.png")
    (again,) = llm.generate([conversation], PARAMS)
    Path("p/0.png").rename("p/away.png")
    (missing,) = llm.generate([conversation], PARAMS)
    Path("p/away.png").rename("p/0.png")
    (found,) = llm.generate([conversation], PARAMS)
    assert (missing.failed, list(found.token_ids)) == (True, expected[0])
    assert [result.error_type for result in results] == ["invalid_image"] * 2
    assert list(again.token_ids) == expected[0]


def test_the_report_shows_small_pictures_of_the_first_rows(model):
    write(rows())
    picture(0, 900, 600).save("p/0.png")
    run(model)
    page = report_job("o.jsonl")
    shown = page.data["rows"]["thumbnails"]["length"]
    assert [len(urls) for urls in shown] == [1, 1, 1, 1]
    small = Image.open(io.BytesIO(base64.b64decode(shown[0][0].removeprefix("data:image/jpeg;base64,"))))
    assert small.size == (96, 64)
    assert f'<img alt="image 1 of the row" src="{shown[0][0]}">' in page.html


def test_two_shards_write_the_same_rows(model, expected):
    write(rows())
    for i in (1, 2):
        run(model, shard=f"{i}/2", limits=TINY)
    merge_job("o.jsonl")
    assert answers() == expected


@pytest.mark.slow
def test_two_devices_write_the_same_rows(model, expected):
    write(rows())
    on_both = ModelConfig(model=str(model), device="cpu:0,1", dtype="float32")
    run_job(replace(config_of(model), model=on_both))
    assert answers() == expected


def test_columns_of_images_come_before_the_prompt_or_where_the_template_says(model, expected):
    pixels = [Path(f"p/{i}.png").read_bytes() for i in range(4)]
    table = pa.table(
        {
            "prompt": [QUESTIONS[0]] * 4,
            "file": [f"p/{i}.png" for i in range(4)],
            "feature": [{"bytes": data, "path": None} for data in pixels],
            "several": [[data] for data in pixels],
        }
    )
    pq.write_table(table, "in.parquet")
    for column in ("file", "feature", "several"):
        report = run(
            model, inputs="in.parquet", output=f"{column}.parquet", prompts=PromptConfig(image_column=(column,))
        )
        assert report.stats["images_encoded"] == 4
        out = pq.read_table(f"{column}.parquet")
        assert out["token_ids"].to_pylist() == expected[:4]
        assert out[column].to_pylist() == table[column].to_pylist()
    for column, suffix in product(("feature", "several"), ("jsonl", "csv")):
        shown = PromptConfig(image_column=(column,))
        run(model, inputs="in.parquet", output=f"{column}.{suffix}", prompts=shown)
        run(model, inputs=f"{column}.{suffix}", output=f"{column}.{suffix}.jsonl", prompts=shown)
        assert answers(f"{column}.{suffix}.jsonl") == expected[:4]
    write([{"a": f"p/{i}.png", "b": None, "q": QUESTIONS[0]} for i in range(4)])
    shown = PromptConfig(image_column=("a", "b"), template="{{ a }}{{ q }}")
    run(model, prompts=shown)
    assert answers() == expected[:4]


def test_an_image_may_be_a_whole_prompt(model, expected, reference, ask):
    """As a page is that is to be read."""
    without = [
        {"page": ""},
        {"page": {"bytes": None, "path": None}},
        {"page": [None]},
        {"page": "p/0.png", "prompt": None},
    ]
    write([{"page": f"p/{i}.png"} for i in range(4)] + without)
    page = PromptConfig(image_column=("page",))
    run(model, prompts=replace(page, prefix=QUESTIONS[0]))
    found = json_rows("o.jsonl")
    assert [row["token_ids"] for row in found[:4]] == expected[:4]
    assert [row["error"]["type"] for row in found[4:]] == ["invalid_row"] * 4
    write([{"page": "p/0.png"}])
    run(model, output="alone.jsonl", prompts=page)
    asked = [{"role": "user", "content": [{"type": "image"}]}]
    alone = reference[0].generate(asked, [picture(0, 60, 60)], TOKENS)[1]
    assert answers("alone.jsonl") == [alone]
    assert list(ask({"page": "p/0.png"}, image_column=("page",)).token_ids) == alone


def asked(reference: tuple[Reference, Path], parts: list[str | int]) -> list[int]:
    """The model's own answer to a message of texts and pictures, which are named by number."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    shown = [picture(part, 60 + 10 * part, 60) for part in parts if isinstance(part, int)]
    return reference[0].generate([{"role": "user", "content": content}], shown, TOKENS)[1]


@pytest.mark.parametrize(
    ("template", "before", "parts"),
    [
        ("{{ a }} {{ q }}", [2, 1, 3], [0, " Which \0?"]),  # those of columns that it does not name come first
        ("{{ a[:5]|upper }}{{ q|lower }}", [2, 1, 3], [0, "which \0?"]),
        ("{{ q }}{% for one in several %} {{ one }}{% endfor %}", [0, 2], ["Which \0? ", 1, " ", 3]),
        ("{{ several|join(' and ') }}{% for one in a %}{{ one }}{% endfor %}", [2], [1, " and ", 3, 0]),
        ("{% if q %}{{ a }}{% else %}{{ b }}{% endif %}{{ q }}{{ several[1] }}", [], [0, "Which \0?", 3]),
        ("{{ row.b }}{{ q }}", [], [2, "Which \0?"]),
        ("{% if a %}{{ q }}{% endif %}", [0, 2, 1, 3], ["Which \0?"]),
    ],
)
@pytest.mark.parametrize("prefix", ["", "Look: "])
def test_every_image_of_a_column_is_shown_where_a_template_writes_it(template, before, parts, prefix, ask, reference):
    row = {"a": "p/0.png", "b": "p/2.png", "several": ["p/1.png", "p/3.png"], "q": "Which \0?"}
    result = ask(row, image_column=("a", "b", "several"), template=template, prefix=prefix)
    first = [prefix + parts[0], *parts[1:]] if isinstance(parts[0], str) else [prefix, *parts] if prefix else parts
    assert list(result.token_ids) == asked(reference, [*before, *first])


@pytest.mark.parametrize("several", [["p/1.png", None, "p/3.png"], '["p/1.png",null,"p/3.png"]'], ids=["list", "CSV"])
def test_a_null_in_a_list_of_images_keeps_its_place_in_a_template(several, ask, reference):
    template = "{% for one in several %}{{ loop.index }}{{ one or 'none' }} {% endfor %}{{ several[2] }}"
    result = ask({"several": several}, image_column=("several",), template=template)
    assert list(result.token_ids) == asked(reference, ["1", 1, " 2none 3", 3, " ", 3])


@pytest.mark.parametrize("q", ["\U00100000", "\\U00100000", "\\udbc0\\udc00", "%F4%80%80%80", "\x00"])
def test_text_that_looks_like_the_mark_of_an_image_stays_text(q, ask, reference):
    result = ask({"a": "p/0.png", "q": f"Press {q} now"}, image_column=("a",), template="{{ a }} {{ q }}")
    assert list(result.token_ids) == asked(reference, [0, f" Press {q} now"])


@pytest.mark.parametrize("template", ["{{ several }}", "{{ q }} {{ a|tojson }}", "{{ a|urlencode }}"])
def test_an_image_that_a_template_writes_as_data_fails_the_row(template, ask):
    row = {"a": "p/0.png", "several": ["p/1.png", "p/3.png"], "q": "Which?"}
    result = ask(row, image_column=("a", "several"), template=template)
    assert result.error_type == "template_error"
    assert result.error_message.startswith("an image of --image-column is written as data: ")


@pytest.mark.parametrize(
    ("content", "images", "parts"),
    [
        (["First", None, "then", None], ["p/0.png", "p/1.png"], ["First", 0, "then", 1]),
        ("Which?", ["p/0.png", "p/1.png"], [0, 1, "Which?"]),
        (["Which?"], "p/0.png", [0, "Which?"]),
        (["Which?"], None, ["Which?"]),
        (["Which?"], {"bytes": None, "path": None}, ["Which?"]),
        (["Which?"], '{"bytes":null,"path":null}', ["Which?"]),
        (["Which?"], '["p/0.png",{"bytes":null,"path":"p/1.png"}]', [0, 1, "Which?"]),
        (["Which?"], ["p/0.png", None, {"bytes": None, "path": None}, "p/1.png"], [0, 1, "Which?"]),
        (["First", None, "then", None], [None, "p/0.png", "p/1.png"], ["First", 0, "then", 1]),
        (["Which?"], [None], ["Which?"]),
    ],
)
def test_a_column_has_the_images_of_messages(content, images, parts, ask, reference):
    """Datasets of conversations have their images in a column beside them."""
    given = [{"type": "image"} if text is None else {"type": "text", "text": text} for text in content]
    messages = [{"role": "user", "content": content if isinstance(content, str) else given}]
    result = ask({"messages": messages, "images": images}, image_column=("images",))
    assert list(result.token_ids) == asked(reference, parts)


@pytest.mark.parametrize(
    ("row", "type", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "invalid_image", "messages[0].content[0] has no image: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["p/0.png", "p/1.png"]},
            "invalid_row",
            "column 'messages' has 1 part for images of --image-column, and the row 2 images",
        ),
        ({"prompt": [5, 6], "images": ["p/0.png"]}, "invalid_row", "the images of --image-column cannot be added to a list of token ids"),
        (
            {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "x"}, "images": ["p/0.png"]},
            "invalid_row",
            "the images of --image-column cannot be added to a request of OpenAI's Batch form",
        ),
    ],
)  # fmt: skip
def test_images_of_a_column_that_have_no_place_fail_the_row(row, type, message, ask):
    result = ask({"images": None, **row}, image_column=("images",))
    assert result.error_type == type
    assert result.error_message.startswith(message)


def test_rows_of_the_batch_api_have_images(model, expected):
    bodies = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": data_url(0)}}, {"type": "text", "text": QUESTIONS[0]}]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": data_url(0)}, {"type": "input_text", "text": QUESTIONS[0]}]}]}),
    ]  # fmt: skip
    write([{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies])
    run(model)
    assert answers() == [expected[0]] * 2
    run(model, output="openai.jsonl", output_format="openai", token_ids=False)
    assert [row["error"] for row in json_rows("openai.jsonl")] == [None] * 2


def test_an_image_that_cannot_be_shown_fails_its_row_alone(model, expected):
    found = rows()[:6]
    picture(2).save("p/cut.jpg", quality=100)
    whole = Path("p/cut.jpg").read_bytes()
    Path("p/cut.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    for row, path in zip(found[1:3], ("p/none.png", "p/cut.jpg"), strict=True):
        row["messages"][0]["content"][0]["path"] = path
    found[3]["messages"][0]["content"].insert(0, {"type": "image", "base64": base64.b64encode(whole[:-80]).decode()})
    found[4]["messages"][0]["content"][0] = {"type": "video", "path": "x.mp4"}
    write(found)
    run(model)
    errors = [
        row["error"] and (row["error"]["type"], row["error"]["message"].split(" (")[0]) for row in json_rows("o.jsonl")
    ]
    assert errors == [
        None,
        ("invalid_image", "the image 'p/none.png' of messages[0].content[0] cannot be read: No such file or directory"),
        ("invalid_image", "the image 'p/cut.jpg' of messages[0].content[0] cannot be read: image file is truncated"),
        ("invalid_image", "the image of messages[0].content[0] cannot be read: image file is truncated"),
        ("unsupported_content", "messages[0].content[0] has type 'video'; only text and images can be sent"),
        None,
    ]
    assert [row["token_ids"] for row in (json_rows("o.jsonl")[0], json_rows("o.jsonl")[5])] == [
        expected[0],
        expected[5],
    ]


@pytest.fixture
def vanishing(model, monkeypatch):
    """The file of the first picture, which has a copy, is removed before the first image is prepared."""
    shutil.copy("p/0.png", "p/copy.png")
    expect = Vision.expect

    def without_it(self: Vision, images: Any) -> None:
        Path("p/0.png").unlink(missing_ok=True)
        expect(self, images)

    monkeypatch.setattr(Vision, "expect", without_it)


def with_copy(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, the second of which names the copy of the first picture."""
    found[1]["messages"][0]["content"][0]["path"] = "p/copy.png"
    return found


@pytest.mark.usefixtures("vanishing")
def test_an_image_whose_file_vanishes_is_read_from_another_file_with_the_same_bytes(model, expected):
    write(with_copy([rows()[0], rows()[4], rows()[8]]))  # one picture, three questions
    assert run(model).exit_code == 0
    assert answers() == [expected[0], expected[4], expected[8]]


def test_a_finished_job_whose_images_are_gone_says_which_rows_fail_instead_of_removing_them(model, expected):
    write(rows())
    run(model)
    Path("p").rename("away")
    write([*rows(), {"id": "new", "messages": [{"role": "user", "content": "And you?"}]}])
    with pytest.raises(UsageError) as error:
        run(model)
    assert str(error.value) == (
        "12 of the 13 finished rows of o.jsonl are no longer in the input or fail now and would be removed from the output; "
        "check the input, where rows fail (the first: in.jsonl:1: invalid_image: the image 'p/0.png' of messages[0].content[0] "
        "cannot be read: No such file or directory); --prune removes them, another -o keeps them"
    )
    assert answers() == expected
    Path("away").rename("p")
    assert run(model).stats["rows_resumed"] == 13


def test_a_result_whose_row_fails_now_is_kept_and_the_note_says_so(model, expected):
    write(rows()[:4] + [row for row in rows()[4:] if not row["id"].startswith("3")])
    run(model)
    Path("p/3.png").rename("away.png")
    run_job(config_of(model, keep=("id",)), seen := Recorder())
    kept = "kept in o.jsonl.job and used again if the row comes back"
    assert f"1 result of o.jsonl without a row in the input, or with one that fails now: {kept}" in seen.notes
    Path("away.png").rename("p/3.png")
    assert run(model).stats["rows_resumed"] == 11
    assert answers()[3] == expected[3]


@pytest.mark.usefixtures("vanishing")
def test_a_row_whose_equal_row_lost_its_image_is_answered_when_errors_are_tried_again(model, expected):
    write(with_copy([rows()[0], rows()[0]]))
    assert run(model).exit_code == 3
    assert run(model, retry=("errors",)).exit_code == 3
    assert [row["error"] and row["error"]["type"] for row in json_rows("o.jsonl")] == ["invalid_image", None]
    assert answers()[1] == expected[0]


TEXT, FORKS = {"max_tokens": TOKENS}, {"max_tokens": 1, "n": 3, "temperature": 1.0, "seed": 1}


@pytest.mark.parametrize(
    ("reference", "options"),
    slow_but(
        [("llava", TEXT), ("qwen3_vl", FORKS)],
        product(["llava", "qwen3_vl"], [TEXT, {"max_tokens": 1}, FORKS, {"choices": ("a", "b")}]),
    ),
    indirect=["reference"],
)
def test_images_that_cannot_be_shown_take_nothing_from_the_rows_beside_them(model, options):
    found = rows()
    for i in (1, 3):
        whole = Path(f"p/{i}.png").read_bytes()
        Path(f"p/{i}.png").write_bytes(whole[:-200])
    write(found)
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": "choices" not in options} | options))
    stats = run(model, sampling=params).stats
    failed = [row["id"] for row in json_rows("o.jsonl") if row["error"] is not None]
    assert failed == [f"{i}-{n}" for n in range(3) for i in (1, 3)]
    assert {row["error"]["type"] for row in json_rows("o.jsonl") if row["error"]} == {"invalid_image"}
    assert all(row["text"] is None for row in json_rows("o.jsonl") if row["error"])
    figures = ("rows_ok", "rows_failed", "images_encoded", "recomputed_tokens")
    assert {name: stats[name] for name in figures} == {
        "rows_ok": 7, "rows_failed": 6, "images_encoded": 2, "recomputed_tokens": 0,
    }  # fmt: skip
    assert stats["prefill_tokens"] <= stats["prefill_tokens_min"]
    others = [row for row in found if row["id"] not in failed]
    answers_beside = [(row["text"], row.get("choice_probs")) for row in json_rows("o.jsonl") if row["error"] is None]
    write(others, "others.jsonl")
    run(model, inputs="others.jsonl", output="alone.jsonl", sampling=params)
    assert [(row["text"], row.get("choice_probs")) for row in json_rows("alone.jsonl")] == answers_beside


@pytest.mark.parametrize("reference", ["mistral3"], indirect=True)
def test_an_image_that_the_encoder_cannot_take_fails_its_row_alone(model, expected):
    """Mistral's encoder merges patches two by two, and an image of 4 x 4 pixels has one."""
    found = rows()[:2]
    picture(7, 4, 4).save("p/small.png")
    found[0]["messages"][0]["content"][0]["path"] = "p/small.png"
    write(found)
    run(model)
    error = json_rows("o.jsonl")[0]["error"]
    assert error["type"] == "invalid_image"
    assert error["message"].startswith("the image 'p/small.png' of messages[0].content[0] cannot be encoded: ")
    assert json_rows("o.jsonl")[1]["token_ids"] == expected[1]


def test_the_plan_counts_the_tokens_of_images(model):
    write(rows())
    plan = plan_job(config_of(model))
    stats = run(model).stats
    for name in ("prompt_tokens", "prefill_tokens_min"):
        assert plan.figures[name] == stats[name]
    assert any("[image]" in line["text"] for line in plan.figures["tree"])


def test_equal_rows_have_equal_keys_wherever_their_images_are(model):
    write(rows()[:1])
    run(model)
    moved = rows()[:1]
    moved[0]["messages"][0]["content"][0] = {"type": "image_url", "image_url": {"url": data_url(0)}}
    write(moved)
    assert run(model).stats["rows_resumed"] == 1
    picture(9).save("p/0.png")
    write(rows()[:1])
    assert run(model, prune=True).stats["rows_resumed"] == 0


@pytest.mark.parametrize("option", ["--image-column", "--image-max-pixels"])
def test_options_of_images_need_a_model_that_sees(option, model, tiny_model_dir):
    write([{"prompt": "a", "image": "p/0.png"}])
    config = config_of(tiny_model_dir)
    if option == "--image-column":
        config = replace(config, prompts=PromptConfig(image_column=("image",)))
    else:
        config = replace(config, model=replace(config.model, image_max_pixels=100))
    message = rf"^{option}: only text can be sent; leave it out, or use a model that sees$"
    with pytest.raises(UsageError, match=message):
        run_job(config)


def test_8_bits_are_compared_on_the_text_of_rows_with_images(model):
    write(rows())
    in_8_bits = ModelConfig(model=str(model), device="cpu", dtype="float32", quantize="int8")
    stats = run_job(replace(config_of(model), model=in_8_bits)).stats
    assert stats["job"]["rows_ok"] == 13
    assert stats["quantization"]["rows"] == 4
    assert stats["job"]["images_encoded"] == 4
