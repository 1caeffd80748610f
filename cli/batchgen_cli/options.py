"""The command's options, made from the fields of the configuration (batchgen/options.py), and the configuration made from them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from batchgen.config import EngineConfig, JobConfig, ModelConfig, PromptConfig
from batchgen.errors import UsageError
from batchgen.options import GROUPS, Option, check, flag_of, number, option, whole_number
from batchgen.sampling_params import SamplingParams

T = TypeVar("T")

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """What a command shows on standard error."""

    progress: bool | None = option(
        None,
        "Show how far the job is.",
        group="Job",
        shown="a bar on a terminal, a line now and then in a log",
    )
    log_format: str = option(
        "text", "Standard error as text, or as one JSON object a line.", group="Job", values=["text", "json"]
    )
    quiet: bool = option(False, "Show errors only.", group="Job", flags=["--quiet", "-q"])
    verbose: bool = option(
        False, "Show the warnings of libraries, and tracebacks of errors.", group="Job", flags=["--verbose", "-v"]
    )

    def __post_init__(self) -> None:
        check(self)


class ConfigOption(click.Option):
    """One option of the command, from the field that declares it. Its value is None, or (), where it is not given."""

    def __init__(self, config: type, f: Field[Any]) -> None:
        declared: Option = f.metadata["option"]
        kinds = [kind.strip() for kind in str(f.type).split("|")]
        switch = "bool" in kinds
        flags = list(declared.flags) or [flag_of(config, f.name)]
        if switch and (f.default is True or "None" in kinds):
            flags[0] += f"/--no-{flags[0].removeprefix('--')}"
        needed = f.default is MISSING and f.default_factory is MISSING
        self.group, self.values, self.shown = declared.group, declared.values, declared.shown
        self.declared_default = f.default
        super().__init__(
            [f.name, *flags],
            type=None if switch else _Value(declared, kinds),
            is_flag=switch,
            multiple=declared.parse is None and kinds[0].startswith("tuple"),
            **({"required": True} if needed else {"default": None}),
            metavar=declared.metavar or None,
            help=declared.help,
        )

    @property
    def default_text(self) -> str:
        """The default as the help shows it; empty where there is nothing to show."""
        default = self.declared_default
        if self.shown or default is None or default is False or default == () or default is MISSING:
            return self.shown
        return self.opts[0] if default is True else str(default).removesuffix(".0")


class _Value(_ParamType):
    """Makes an option's value of its text, as the option declares."""

    name = "value"

    def __init__(self, declared: Option, kinds: list[str]) -> None:
        whole, real = {"int", "tuple[int, ...]"} & set(kinds), "float" in kinds
        self._parse: Callable[[str, str], Any] = declared.parse or (
            whole_number if whole else number if real else lambda _, text: text
        )
        self._declared = declared

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = next((opt for opt in param.opts if opt.startswith("--")), "") if param else ""
        return self._parse(name, value) if isinstance(value, str) else value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self._declared.values:
            return [CompletionItem(v) for v in self._declared.values if v.startswith(incomplete)]
        words = {"FILE": "file", "OUTPUT": "file", "MODEL": "file", "DIR": "dir"}
        kind = next((kind for word, kind in words.items() if word in self._declared.metavar), None)
        return [CompletionItem(incomplete, type=kind)] if kind else []


class FileArgument(click.Argument):
    """A positional argument that names files, with a help text."""

    def __init__(self, name: str, help: str, **settings: Any) -> None:
        super().__init__([name], **settings)
        self.text = help

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class _Formatter(click.HelpFormatter):
    """Help that breaks no word at its hyphens: `--max-tokens` stays whole."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 28, col_spacing: int = 2) -> None:
        rows = list(rows)
        first = min(max(len(name) for name, _ in rows), col_max) + col_spacing
        indent = " " * self.current_indent
        for name, text in rows:
            lines = textwrap.wrap(text, max(self.width - first - self.current_indent, 10), break_on_hyphens=False)
            head = f"{indent}{name}"
            if len(name) > first - col_spacing and lines:
                self.write(f"{head}\n")
                head = ""
            for line in lines:
                self.write(f"{head:<{first + self.current_indent}}{line}\n")
                head = ""
            if not lines:
                self.write(f"{head}\n")


class _Context(click.Context):
    formatter_class = _Formatter


class Group(click.Group):
    """The command as a whole."""

    context_class = _Context
    example = ""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            formatter.write_dl([(self.example, "")])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.short_help or "") for name, command in self.commands.items()])


class Command(click.Command):
    """A command whose help lists its options in groups, with one example, whole at every width."""

    context_class = _Context
    example = ""
    brief = False
    """Whether the help leaves the options of `batchgen run` out, but for --model."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        arguments = [p for p in self.params if isinstance(p, FileArgument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(p.make_metavar(ctx), p.text) for p in arguments])
        for group in (*GROUPS, "Options"):
            rows = [(_names(p), _help(p)) for p in self.get_params(ctx) if _group(p) == group and self._listed(p)]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)

    def _listed(self, param: click.Parameter) -> bool:
        return not self.brief or not isinstance(param, ConfigOption) or param.name == "model"

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            formatter.write_dl([(self.example, "")])


def _group(param: click.Parameter) -> str:
    if isinstance(param, ConfigOption):
        return param.group
    return "Options" if isinstance(param, click.Option) else ""


def _names(param: click.Parameter) -> str:
    """Its names and what stands for its value: `--model, -m MODEL`."""
    names = ", ".join([*param.opts, *param.secondary_opts])
    return f"{names} {param.metavar}" if param.metavar else names


def _help(param: click.Parameter) -> str:
    text = getattr(param, "help", "") or ""
    default = param.default_text if isinstance(param, ConfigOption) else ""
    needed = "  [required]" if param.required else ""
    return f"{text}  [default: {default}]" if default else text + needed


def config_options(*configs: type) -> list[click.Parameter]:
    """The options that the fields of these dataclasses declare, by group, in the order of the fields."""
    found = [ConfigOption(config, f) for config in configs for f in fields(config) if "option" in f.metadata]
    return [*sorted(found, key=lambda o: GROUPS.index(o.group))]


def job_options() -> list[click.Parameter]:
    """The inputs and every option of a job."""
    inputs = FileArgument(
        "inputs",
        "JSONL, Parquet or CSV files (also .gz, .zst), a folder, a glob, a URL, or - for JSONL on standard input.",
        nargs=-1,
        required=True,
        metavar="INPUT...",
    )
    return [
        inputs,
        *config_options(ModelConfig, PromptConfig, SamplingParams, JobConfig, EngineConfig, Display),
    ]


def job_config(values: Mapping[str, Any]) -> JobConfig:
    """The job that the values of `job_options` ask for. Raises `UsageError`."""
    return JobConfig(
        inputs=tuple(values["inputs"]),
        model=build(ModelConfig, values),
        prompts=build(PromptConfig, values),
        sampling=_sampling(values),
        engine=build(EngineConfig, values),
        **_given(JobConfig, values),
    )


def build(config: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of the options that were given; the others keep their defaults."""
    return config(**_given(config, values))


def _given(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a dataclass's options those that were given. An option that is given as None (`--batch-size auto`) has that default."""
    named = [f.name for f in fields(config) if "option" in f.metadata]
    return {name: values[name] for name in named if values.get(name) not in (None, ()) or _is_given(name)}


def _is_given(name: str) -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters; a value out of range is told by its option's name."""
    try:
        return build(SamplingParams, values)
    except ValueError as e:
        name, _, rest = str(e).partition(" ")
        before, together, other = rest.rpartition("combined with ")
        if together:
            rest = f"{before}{together}{flag_of(SamplingParams, other)}"
        raise UsageError(f"{flag_of(SamplingParams, name)} {rest}") from None


def similar(word: str, known: list[str], count: int = 3) -> list[str]:
    """The known words that one may have meant: those that begin with it, else those that look like it."""
    begin = [k for k in known if k.startswith(word)] if len(word.strip("-")) > 1 else []
    return begin[:count] or get_close_matches(word, known, count, cutoff=0.85)
