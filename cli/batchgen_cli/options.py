"""Makes the command's options from the fields of the configuration (batchgen/options.py), and the configuration from given options."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from inspect import Parameter
from typing import Annotated, Any, ClassVar, TypeVar

import typer
import typer.core

from batchgen.config import EngineConfig, JobConfig, ModelConfig, PromptConfig
from batchgen.errors import UsageError
from batchgen.options import GROUPS, Option, check, flag_of, number, option, whole_number
from batchgen.sampling_params import SamplingParams
from batchgen_cli.stderr import exit_code_of, for_encoding

T = TypeVar("T")
_METAVARS = {"int": "N", "float": "X"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """Options of what a command shows on standard error."""

    GROUP: ClassVar = "Job"

    progress: bool | None = option(
        None,
        "Show the progress of the job.",
        shown="a bar on a terminal, a line every 10 s in a log",
    )
    log_format: str = option(
        "text", "Write standard error as text, or as one JSON object per line.", values=["text", "json"]
    )
    quiet: bool = option(False, "Show errors only.", flags=["--quiet", "-q"])
    verbose: bool = option(False, "Show warnings of libraries and tracebacks of errors.", flags=["--verbose", "-v"])

    def __post_init__(self) -> None:
        check(self)

    @property
    def as_json(self) -> bool:
        return self.log_format == "json"


JobOutput = Annotated[str, typer.Argument(metavar="OUTPUT", help="The output of a run.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)]


def option_of(config: type, name: str) -> Any:
    """Returns the option of one field of a configuration, for a command that has only a few options and does not group them."""
    declared = _typer_option(config, next(f for f in fields(config) if f.name == name))
    declared.rich_help_panel = None
    return declared


def job_parameters() -> list[Parameter]:
    """Returns the inputs and all options of a job as parameters of a function, which Typer takes for those of a command.

    An option that is not given is None (or an empty list), because only the configuration has defaults.
    """
    inputs = typer.Argument(
        metavar="INPUT...",
        help="JSONL, Parquet, CSV or TSV files (also .gz, .zst), a folder, a glob, a URL, or - for standard input (JSONL unless --input-format says otherwise).",
        show_default=False,
    )
    configs = (ModelConfig, SamplingParams, PromptConfig, JobConfig, EngineConfig, Display)
    declared = [(config, f) for config in configs for f in fields(config) if "option" in f.metadata]
    declared.sort(key=lambda each: GROUPS.index(_group(*each)))
    for each in [each for each in declared if each[1].metadata["option"].after]:
        declared.remove(each)
        names = [f.name for _, f in declared]
        declared.insert(names.index(each[1].metadata["option"].after) + 1, each)
    parameters = [Parameter("inputs", Parameter.KEYWORD_ONLY, annotation=Annotated[list[str], inputs])]
    for config, f in declared:
        required = f.default is MISSING and f.default_factory is MISSING
        annotation = Annotated[_type(f), _typer_option(config, f)]  # type: ignore[valid-type]
        default = Parameter.empty if required else None
        parameters.append(Parameter(f.name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default))
    dry_run = typer.Option(
        "--dry-run", help="Generate nothing. Show the plan, like batchgen plan.", rich_help_panel="Job"
    )
    annotation = Annotated[bool, dry_run]
    return [*parameters, Parameter("dry_run", Parameter.KEYWORD_ONLY, annotation=annotation, default=False)]


def _type(f: Field[Any]) -> Any:
    if "bool" in _type_names(f):
        return bool | None
    return list[str] | None if _repeats(f) else str | None


def _typer_option(config: type, f: Field[Any]) -> Any:
    declared: Option = f.metadata["option"]
    switch = "bool" in _type_names(f)
    flags = list(declared.flags) or [flag_of(config, f.name)]
    if switch and (f.default is True or "None" in _type_names(f)):
        flags[0] += f"/--no-{flags[0].removeprefix('--')}"
    return typer.Option(
        *flags,
        help=declared.help,
        metavar=declared.metavar or next((name for kind, name in _METAVARS.items() if kind in _type_names(f)), None),
        show_default=_shown_default(f),
        rich_help_panel=_group(config, f),
        autocompletion=_completion(declared),
    )


def _group(config: Any, f: Field[Any]) -> str:
    return f.metadata["option"].group or str(config.GROUP)


def _type_names(f: Field[Any]) -> list[str]:
    return [kind.strip() for kind in str(f.type).split("|")]


def _repeats(f: Field[Any]) -> bool:
    return f.metadata["option"].parse is None and str(f.type).startswith("tuple")


def _shown_default(f: Field[Any]) -> str | bool:
    """Returns the default as the help shows it; False if there is nothing to show."""
    shown = f.metadata["option"].shown
    if shown:
        return str(shown)
    if f.default is None or f.default is False or f.default == () or f.default is MISSING:
        return False
    return flag_of(Display, f.name) if f.default is True else str(f.default).removesuffix(".0")


def _completion(declared: Option) -> Callable[[str], list[str]] | None:
    """Returns a function that completes the option's value if it takes only a few texts; None leaves completion to the shell."""
    if not declared.values:
        return None
    return lambda incomplete: [value for value in declared.values if value.startswith(incomplete)]


class Command(typer.core.TyperCommand):
    """A command whose function returns the exit code, and whose errors are lines on standard error.

    Its help lists its options in groups, with `epilog` as an example. Nothing is cut off on a narrow terminal.
    """

    brief: ClassVar[bool] = False
    """Whether the help leaves out the options of `batchgen run`, except --model."""

    def invoke(self, ctx: typer.Context) -> int:  # type: ignore[override]
        run, given = super().invoke, ctx.params
        return exit_code_of(
            lambda: run(ctx), verbose=bool(given.get("verbose")), as_json=given.get("log_format") == "json"
        )

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        formatter.write(for_encoding(help_text(self, ctx, formatter.width), encoding))


class CommandGroup(typer.core.TyperGroup):
    """The command `batchgen`, which groups the others."""

    brief = False

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        formatter.write(help_text(self, ctx, formatter.width))


def help_text(command: Any, ctx: Any, width: int) -> str:
    """Returns the help of a command: usage, description, arguments, options in groups, the commands of a group, one example."""
    groups = shown_params(command, command.get_params(ctx))
    commands = [(name, one.get_short_help_str(200)) for name, one in getattr(command, "commands", {}).items()]
    following = ["COMMAND", "[ARGS]..."] if commands else map(names_of, groups.get("Arguments", []))
    usage = " ".join([ctx.command_path, "[OPTIONS]", *following])
    lines = [f"Usage: {usage}\n"]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [*_paragraph(paragraph, width), ""]
    lines.pop()
    for group, params in groups.items():
        lines += _section(group, [(names_of(p), _help(p)) for p in params], width)
    lines += _section("Commands", commands, width) if commands else []
    return "\n".join([*lines, *_section("Example", [(command.epilog, "")], width), ""])


def shown_params(command: Any, params: Sequence[Any]) -> dict[str, list[Any]]:
    """Returns the arguments and options that the help of a command shows, by group, in the order of the groups."""
    groups: dict[str, list[Any]] = {group: [] for group in ("Arguments", *GROUPS, "Options")}
    for p in params:
        panel = getattr(p, "rich_help_panel", None)  # --help has none in some versions of Typer
        group = "Arguments" if p.param_type_name == "argument" else panel or "Options"
        if not command.brief or group not in GROUPS or p.name == "model":
            groups[group].append(p)
    return {group: found for group, found in groups.items() if found}


def names_of(param: Any) -> str:
    """Returns the names and the placeholder of an option: `--model, -m MODEL`. An argument is only a placeholder."""
    if param.param_type_name == "argument":
        return str(param.metavar)
    names = ", ".join([*sorted(param.opts, key=lambda opt: not opt.startswith("--")), *param.secondary_opts])
    return f"{names} {param.metavar}" if param.metavar and not param.is_flag else names


def _help(param: Any) -> str:
    default, text = default_text(param), param.help or ""
    required = param.required and param.param_type_name == "option"
    return f"{text}  [default: {default}]" if default else text + ("  [required]" if required else "")


def default_text(param: Any) -> str:
    """Returns the default as the help shows it; empty if there is nothing to show."""
    return param.show_default if isinstance(param.show_default, str) else ""


def _paragraph(text: str, width: int) -> list[str]:
    """Returns lines of at most `width` characters. Words are not broken at hyphens, so `--max-tokens` stays whole."""
    wrapped = textwrap.wrap(text, width - 2, break_on_hyphens=False, break_long_words=False)
    return [f"  {line}" for line in wrapped]


def _section(title: str, rows: list[tuple[str, str]], width: int) -> list[str]:
    """Returns a heading, and names with their texts in a second column."""
    column = min(max(len(name) for name, _ in rows), 28) + 4
    lines = ["", f"{title}:"]
    for name, text in rows:
        head = f"  {name}"
        if len(head) + 2 > column and text:
            lines.append(head)
            head = ""
        wrapped = textwrap.wrap(text, max(width - column, 10), break_on_hyphens=False) or [""]
        lines += [f"{head if i == 0 else '':<{column}}{line}".rstrip() for i, line in enumerate(wrapped)]
    return lines


def job_config(given: Mapping[str, Any]) -> JobConfig:
    """Returns the configuration of a job from the given options. Raises `UsageError`."""
    return JobConfig(
        inputs=tuple(given["inputs"]),
        model=build(ModelConfig, given),
        prompts=build(PromptConfig, given),
        sampling=_sampling(given),
        engine=build(EngineConfig, given),
        **_values(JobConfig, given),
    )


def build(config: type[T], given: Mapping[str, Any]) -> T:
    """Returns a `config` made from the given options; others keep their defaults. Raises `UsageError`."""
    return config(**_values(config, given))


def _values(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f.name: _option_value(config, f, given[f.name])
        for f in fields(config)
        if "option" in f.metadata and given.get(f.name) not in (None, [], ())
    }


def _option_value(config: type, f: Field[Any], text: Any) -> Any:
    """Returns the value of an option's text, or of its texts if it is repeatable."""
    if isinstance(text, bool):
        return text
    declared: Option = f.metadata["option"]
    kinds = {kind.removeprefix("tuple[").removesuffix(", ...]") for kind in _type_names(f)}
    parse = declared.parse or (whole_number if "int" in kinds else number if "float" in kinds else lambda _, same: same)
    flag = flag_of(config, f.name)
    return tuple(parse(flag, each) for each in text) if _repeats(f) else parse(flag, text)


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters. Raises `UsageError`, which names the option, for a value out of range."""
    try:
        return build(SamplingParams, given)
    except ValueError as e:
        name, _, rest = str(e).partition(" ")
        before, together, other = rest.rpartition("combined with ")
        if together:
            rest = f"{before}{together}{flag_of(SamplingParams, other)}"
        raise UsageError(f"{flag_of(SamplingParams, name)} {rest}") from None


def similar(word: str, known: list[str], cutoff: float = 0.85) -> list[str]:
    """Returns the known words that may have been meant: those that begin with `word`, else those that look like it."""
    begin = [k for k in known if k.startswith(word)] if len(word.strip("-")) > 1 else []
    return begin[:3] or get_close_matches(word, known, cutoff=cutoff)
