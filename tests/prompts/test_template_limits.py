"""A render takes at most so much processor time, memory and output, whatever the template does."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import BatchgenError, UsageError
from batchgen.process.templates import RenderingStopped, TemplateFailure, TemplateProcess
from support.params import slow_but

NESTED = "{% for a in t %}{% for b in t %}{% for c in t %}{% endfor %}{% endfor %}{% endfor %}"
C_CODE = "{{ range(10 ** 12) | sum }}"  # one step of C code, during which no other code of its process runs
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LOREM = "{{ lipsum(n=1000000) }}"
TIME = "it takes more than 1 seconds of processor time"
MEMORY = "it needs more than 1024 MiB of memory"
SIZE = "it writes more than 10000000 characters"
DOUBLING = "{% set n = namespace(x=t) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """A gigabyte takes more than a second on a slow machine."""
    process = TemplateProcess(seconds=600, memory=1 << 30)
    yield process
    process.close()


@pytest.fixture(scope="module")
def hurried() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=1, memory=1 << 30)
    yield process
    process.close()


def given(form: str, a: int) -> dict[str, Any]:
    """Returns the input of a row, or of a conversation."""
    columns: dict[str, Any] = {"a": a, "t": "x" * 3200}
    return columns if form == "row" else {**columns, "conversations": [[{"role": "user", "content": "x"}]]}


@pytest.mark.parametrize("form", ["row", "chat"])
@pytest.mark.parametrize(
    ("template", "why"),
    [
        *slow_but([], [(NESTED, TIME), (RECURSIVE, TIME), (LOREM, TIME)]),
        ("{{ t.zfill(3000000000) }}", MEMORY),
        ("{{ t.ljust(3000000000) }}", MEMORY),
        ("{{ '{:>3000000000}'.format(1) }}", MEMORY),
        ("{{ '%3000000000d' % 1 }}", MEMORY),
        ("{{ 'x' * 3000000000 }}", MEMORY),
        ("{{ [0] * 3000000000 }}", MEMORY),
        ("{{ t | center(3000000000) }}", MEMORY),
        ("{{ t | indent(3000000000) }}", MEMORY),
        ("{{ [1] | batch(1000000000, 'x') | list }}", MEMORY),
        ("{{ range(10 ** 9) | list }}", MEMORY),
        (DOUBLING, MEMORY),
        ("{% for i in range(60000) %}{{ t }}{% endfor %}", SIZE),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    ],
)
def test_a_template_that_does_not_end_or_grows_fails_its_row_alone(process, hurried, form, template, why):
    if form == "chat" and "range(10" in template:
        why = "Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000)."
    source = "{% if a %}" + template + "{% endif %}b"
    first, failure, last = (hurried if why == TIME else process).render(
        form, source, [given(form, a) for a in (0, 1, 0)]
    )
    assert (first, last) == ("b", "b")
    assert failure.message == why


def test_only_the_row_fails_that_was_rendered_when_the_process_ended(hurried):
    inputs = [{"a": i == 300, "i": i} for i in range(400)]
    answers = hurried.render("row", "{% if a %}" + C_CODE + "{% endif %}{{ i }}", inputs)
    assert answers.pop(300) == TemplateFailure("limit", TIME)
    assert answers == [str(i) for i in range(400) if i != 300]


def test_a_large_batch_is_rendered_in_order(process):
    texts = [f"{i}" * 1000 for i in range(3000)]
    assert process.render("row", "{{ t }}", [{"t": text} for text in texts]) == texts
    assert process.render("row", "{{ t }}", [{"t": "x" * 50_000_000}]) == ["x" * 50_000_000]


def test_a_caller_that_stops_does_not_wait_for_a_render():
    process = TemplateProcess(seconds=3600)
    calls = iter([False, True])
    with pytest.raises(RenderingStopped):
        process.render("row", NESTED, [given("row", 1)], lambda: next(calls))
    assert process.render("row", "b", [{}]) == ["b"]
    process.close()


@pytest.mark.parametrize("used", [False, True])
def test_a_process_that_was_killed_starts_again_also_before_its_first_template(used):
    process = TemplateProcess()
    process.start()
    assert process._child.connection.poll(60)
    if used:
        process.render("row", "b", [{}])
    process._child.process.kill()
    process._child.process.wait()
    assert process.render("row", "b", [{}]) == ["b"]
    process.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_folder_for_temporary_files_that_is_full_is_no_fault_of_a_row(monkeypatch):
    with tempfile.TemporaryFile() as said, Path("/dev/full").open("r+b", 0) as place:
        files = iter([said, place])
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: next(files))
        monkeypatch.setattr(tempfile, "tempdir", "/full")
        with pytest.raises(BatchgenError) as error:
            TemplateProcess().render("row", "b", [{}])
    full = "the folder for temporary files, /full, cannot be written to: No space left on device"
    assert str(error.value) == f"{full}; free some space there, or set TMPDIR to another folder"


@pytest.mark.parametrize("kills", [1, 2])
def test_a_row_at_which_the_process_was_killed_is_tried_once_more(kills):
    process = TemplateProcess(seconds=3600)
    killed = []

    def kill() -> bool:
        if process._ready and process._child.process not in killed:
            if len(killed) == kills:
                return True
            killed.append(process._child.process)
            process._child.process.kill()
        return False

    if kills == 1:
        with pytest.raises(RenderingStopped):
            process.render("row", NESTED, [given("row", 1)], kill)
    else:
        (failure,) = process.render("row", NESTED, [given("row", 1)], kill)
        assert (failure.kind, failure.message) == ("limit", "the process that renders templates ended: SIGKILL")
    assert process.render("row", "b", [{}]) == ["b"]
    process.close()


def test_a_chat_template_that_recurses_for_ever_is_refused_before_the_first_row(tools):
    with pytest.raises(
        UsageError, match=r"^the model's chat template does not work for a short message: .*recursion.*; correct it"
    ):
        tools.builder(chat_template="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


def test_usual_templates_are_not_refused(tools):
    template = (
        "{{ 'a' * 3 }}|{{ 2 ** 10 }}|{{ 2 ** 0.5 }}|{{ 3000 * 4000 * 5000 }}|{{ 1.5 * 2 }}|{{ '%05d' % 7 }}|{{ 'x' | center(3) }}"
        "|{{ a + ['b'] }}|{% for i in range(2, 9, 3) %}{{ i }}{% endfor %}|{{ a | tojson(indent=2) }}"
    )
    said = "aaa|1024|1.4142135623730951|60000000000|3.0|00007| x |['a', 'b']|258|[\n  \"a\"\n]"
    (draft,) = tools.builder(template=template).build(tools.rows({"a": ["a"]}))
    assert tools.text_of(draft) == "<s>" + said
    chat = tools.builder(chat_template="{% set a = ['a'] %}" + template, bos=False)
    (draft,) = chat.build(tools.rows({"prompt": "a"}))
    assert tools.text_of(draft) == said


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000]
)
def test_a_template_that_cannot_be_compiled_is_a_usage_error(tools, source):
    with pytest.raises(UsageError):
        tools.builder(template=source)
