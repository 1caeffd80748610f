"""Templates are programs: each render has a limit of time and of size, whoever wrote the template, in any thread."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import tracemalloc

import pytest

from batchgen.errors import Interrupted, RowError, TooManyErrors, UsageError
from batchgen.prompts import limits
from batchgen.prompts.limits import LATE_IN_A_ROW, Limited, LimitError
from batchgen.prompts.template import RowTemplate
from batchgen.signals import Signals

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
ONLY_FOR_STOP = "{% if messages[0].content == 'stop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"

# Of a gigabyte or more, each in a single step; `big` is 1,000,000.
BOMBS = [
    "{{ 'x' * (big * 10000) }}",
    "{{ (big * 10000) * 'x' }}",
    "{{ [0] * (big * 10000) }}",
    "{{ 10 ** big }}",
    "{{ 'x'.center(big * 10000) }}",
    "{{ 'x'.ljust(big * 10000) }}",
    "{{ 'x'.zfill(big * 10000) }}",
    "{{ '\t'.expandtabs(tabsize=big * 10000) }}",
    "{{ 'x' | center(big * 10000) }}",
    "{{ 'x\ny' | indent(big * 10000) }}",
    "{{ [1] | batch(big * 10000, 0) | list }}",
    "{{ [1] | tojson(indent=big * 10000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (big * 10000, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, big * 10000) }}",
    "{{ ('x' * big).replace('x', 'y' * big) }}",
    "{{ ('x' * big) | replace('x', 'y' * big) }}",
    "{% set n = namespace(x='x' * big) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "{% set n = namespace(x='x' * big) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "{% set x = 'x' * big %}{% macro m() %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "{% set x = 'x' * big %}{% for i in range(9999) %}{{ x }}{% endfor %}",
]
TOO_LONG = "more than 10000000 characters come out"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders may take 0.3 s. The watchdog, if it sleeps already, wakes within a second."""
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    monkeypatch.setattr(limits, "_WATCHDOG", limits._Watchdog())


@pytest.mark.parametrize("template", [ENDLESS, RECURSIVE])
def test_a_template_that_does_not_end_fails_its_row_and_the_others_go_on(tools, short, template):
    b = tools.builder(template="{% if a %}" + template + "{% endif %}b", prefix="")
    first, second, third = b.build(tools.rows({"a": 0}, {"a": 1}, {"a": 0}))
    assert tools.text_of(first) == tools.text_of(third) == "<s>b"
    assert tools.error_of(second) == ("template_error", "template: it takes more than 0.3 seconds")


def test_a_chat_template_that_does_not_end_fails_its_row_and_the_others_go_on(tools, short):
    first, second, third = tools.builder(chat_template=ONLY_FOR_STOP).build(
        tools.rows({"prompt": "a"}, {"prompt": "stop"}, {"prompt": "a"})
    )
    assert tools.text_of(first) == tools.text_of(third) == "a"
    assert tools.error_of(second) == ("template_error", "chat template: it takes more than 0.3 seconds")


def test_a_chat_template_that_never_ends_is_told_before_the_first_row(tools, short):
    with pytest.raises(UsageError) as e:
        tools.builder(chat_template=ENDLESS)
    said = "the model's chat template does not work for a short message: it takes more than 0.3 seconds; mend it, or give another"
    assert str(e.value) == said


def test_a_template_that_ends_for_no_row_ends_the_job(tools, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.02)
    monkeypatch.setattr(limits, "_WATCHDOG", limits._Watchdog())
    with pytest.raises(TooManyErrors) as e:
        tools.builder(template=ENDLESS).build(tools.rows(*[{"a": 1}] * 1000))
    assert str(e.value) == (
        "the template took more than 0.02 seconds for each of 20 rows, one after the other; "
        "mend it, or the rows, so that it comes to an end"
    )


def test_only_rows_one_after_the_other_end_the_job(short, monkeypatch):
    monkeypatch.setattr(limits, "LATE_IN_A_ROW", 2)
    limited, template = Limited("template"), RowTemplate("{% if a %}" + ENDLESS + "{% endif %}")
    for a in (1, 0, 1, 0):
        if a:
            with pytest.raises(LimitError, match=r"more than 0\.3 seconds"):
                limited(lambda: template._template.render(a=1))
        else:
            assert limited(lambda: template._template.render(a=0)) == ""
    assert LATE_IN_A_ROW == 20


@pytest.mark.parametrize("template", BOMBS)
def test_nothing_huge_is_built_in_a_single_step(tools, template):
    whole = "{% set big = 1000000 %}" + template
    tracemalloc.start()
    try:
        (by_row,) = tools.builder(template=whole).build(tools.rows({"a": 1}))
        chat = tools.builder(chat_template="{% if messages[0].content == 'a' %}" + whole + "{% endif %}")
        (by_chat,) = chat.build(tools.rows({"prompt": "a"}))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tools.error_of(by_row) == ("template_error", f"template: {TOO_LONG}")
    assert tools.error_of(by_chat) == ("template_error", f"chat template: {TOO_LONG}")
    assert peak < 100_000_000


def test_what_templates_usually_do_is_not_refused(tools):
    template = (
        "{{ 'a' * 3 }}|{{ 2 ** 10 }}|{{ '%05d' % 7 }}|{{ '{:>4}'.format(1) }}|{{ 'x' | center(3) }}|{{ 'a-b'.replace('-', '+') }}"
        "|{{ a + ['b'] }}|{{ 'n' ~ 12345678901 }}|{{ a | tojson(indent=2) }}|{{ '%s' | format(12345678901) }}|{{ 100 % 7 }}"
    )
    said = "aaa|1024|00007|   1| x |a+b|['a', 'b']|n12345678901|[\n  \"a\"\n]|12345678901|2"
    (draft,) = tools.builder(template=template).build(tools.rows({"a": ["a"]}))
    assert tools.text_of(draft) == "<s>" + said
    chat = tools.builder(chat_template="{% set a = ['a'] %}" + template, bos=False)
    (draft,) = chat.build(tools.rows({"prompt": "a"}))
    assert tools.text_of(draft) == said


def test_memory_and_recursion_that_run_out_fail_the_row(tools):
    endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    b = tools.builder(template="{% if a %}" + endless + "{% endif %}b")
    first, second = b.build(tools.rows({"a": 1}, {"a": 0}))
    assert tools.error_of(first)[0] == "template_error"
    assert "recursion" in tools.error_of(first)[1]
    assert tools.text_of(second) == "<s>b"

    def no_memory() -> str:
        raise MemoryError

    template = RowTemplate("x")
    template._template.render = lambda *_: no_memory()  # type: ignore[method-assign]
    with pytest.raises(RowError, match="template: MemoryError"):
        template.render({})


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000]
)
def test_a_template_that_cannot_be_compiled_is_wrong_use(tools, source):
    with pytest.raises(UsageError):
        tools.builder(template=source)


def test_a_render_in_another_thread_is_stopped_there_and_others_are_not_touched(short):
    template = RowTemplate("{% if a %}" + ENDLESS + "{% endif %}b")
    said: dict[int, list[str]] = {}

    def renders(a: int) -> None:
        said[a] = []
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                said[a].append(template.render({"a": a}))
            except RowError as e:
                said[a].append(e.message)

    threads = [threading.Thread(target=renders, args=(a,)) for a in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(said[0]) == {"b"}
    assert set(said[1]) == {"template: it takes more than 0.3 seconds"}


def test_the_end_of_the_time_never_arrives_after_the_render(monkeypatch):
    """Renders that end just when their time does: each is in time or late, and nothing comes later."""
    monkeypatch.setattr(limits, "SECONDS", 0.002)
    monkeypatch.setattr(limits, "_WATCHDOG", limits._Watchdog())
    limited = Limited("template")
    monkeypatch.setattr(limits, "LATE_IN_A_ROW", 10**9)
    seen = {"in time": 0, "late": 0}
    span = 0.001

    def spin() -> str:
        end = time.perf_counter() + span
        while time.perf_counter() < end:
            pass
        return "x"

    while min(seen.values()) < 50:
        try:
            limited(spin)
            seen["in time"] += 1
            span *= 1.01  # so that both happen about as often
        except LimitError:
            seen["late"] += 1
            span /= 1.01
        for _ in range(200):  # where a late one would arrive
            pass


@pytest.mark.parametrize("fails", [False, True])
def test_a_render_that_ends_while_the_watchdog_strikes_waits_for_the_blow(short, fails):
    """The watchdog has decided, and is slow to raise: what it raises must not arrive in what comes after the render."""

    def render() -> str:
        thread = threading.get_ident()
        assert limits._WATCHDOG._renders[thread].claim(late=True)
        raising = ctypes.c_ulong(thread), ctypes.py_object(limits._TimeUpError)
        threading.Timer(0.05, ctypes.pythonapi.PyThreadState_SetAsyncExc, raising).start()
        if fails:
            raise ValueError("of the template")
        return "x"

    with pytest.raises(ValueError if fails else LimitError):
        Limited("template")(render)
    time.sleep(0.1)  # where it would arrive


def test_a_signal_ends_a_render_before_its_time_and_the_watchdog_forgets_it(monkeypatch):
    watchdog = limits._Watchdog()
    monkeypatch.setattr(limits, "_WATCHDOG", watchdog)
    monkeypatch.setattr(limits, "SECONDS", 1000.0)
    template = RowTemplate(ENDLESS)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(Interrupted), Signals(grace=5) as signals, signals.interruptible():
        template.render({})
    assert watchdog._renders == {}


def test_the_watchdog_is_there_after_a_fork(short):
    template = RowTemplate("{% if a %}" + ENDLESS + "{% endif %}b")
    assert template.render({"a": 0}) == "b"
    watchdog = limits._WATCHDOG
    watchdog._thread = threading.Thread()  # as in the child: an object of a thread that does not run
    with pytest.raises(RowError, match=r"it takes more than 0\.3 seconds"):
        template.render({"a": 1})
    assert watchdog._thread.is_alive()


def test_transformers_compiles_chat_templates_where_we_guard_them(tools):
    """A release of transformers that compiles them elsewhere is noticed here, not by a machine without memory."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from batchgen.prompts.sandbox import GuardedEnvironment

    source = "{{ messages[0].content }}{# guarded #}"
    tools.builder(chat_template=source)
    assert type(_compile_jinja_template(source).environment) is GuardedEnvironment
