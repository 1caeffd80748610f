"""Faults that `benchmarks.mutations` puts into modules: each is one small change, and is found again when lines around it have moved."""

import ast

import pytest

from benchmarks.mutations import Fault, faults_of, sample, with_fault

SOURCE = '''
def head(words: list[str], count: int = 2) -> list[str]:
    """Returns the first words."""
    if not words and count > 0:
        raise ValueError(f"{count + 1} words")
    seen.add(len(words) - 1)
    return words[: min(count, 3)]
'''


def changes(source: str) -> list[tuple[str, str]]:
    return [(fault.old, fault.new) for fault in faults_of("a", "a.py", source)]


def test_faults_turn_conditions_numbers_calls_and_results_but_no_annotation_or_message():
    assert changes(SOURCE) == [
        ("2", "3"), ("not words and count > 0", "not (not words and count > 0)"),
        ("not words and count > 0", "((not words) or (count > 0))"), ("not words", "(words)"),
        ("count > 0", "((count) >= (0))"), ("0", "1"), ("seen.add(len(words) - 1)", "..."),
        ("len(words) - 1", "((len(words)) + (1))"), ("1", "2"), ("return words[: min(count, 3)]", "return None"),
        ("min", "max"), ("3", "4"),
    ]  # fmt: skip


def test_each_fault_gives_a_module_that_python_can_read():
    for fault in sample(60, seed=2, areas=["scheduler", "blocks"]):
        with open(fault.file, encoding="utf-8") as file:
            changed = with_fault(file.read(), fault)
        ast.parse(changed)


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("a = 0\nx = 1\nx = 1\n", "a = 0\nx = 1\nx = 2\n"),
        ("x = 1\n\nx = 1\n", "x = 1\n\nx = 2\n"),
        ("x = 1\n", None),
        ("", None),
    ],
)
def test_a_fault_is_found_by_its_line(source, changed):
    assert with_fault(source, Fault("a", "a.py", "x = 1", nth=1, column=4, old="1", new="2")) == changed
