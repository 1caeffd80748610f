"""The data files of a dataset: a repository of the Hub, or a folder on disk with the same layout. Reads no rows.

Configurations and splits are those that the package `datasets` finds: the `configs` of the README.md, else files
`data/SPLIT-00000-of-00001.parquet`, else names of folders or files that hold a word for a split, else all files as the split `train`
(https://huggingface.co/docs/hub/datasets-data-files-configuration). A test compares the two.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from batchgen.errors import UsageError, first_line
from batchgen.records.files import ANY_FORMAT, in_job_folder, is_lost_link, split_name
from batchgen.records.hub_errors import reaching_hub
from batchgen.records.remote import open_remote
from batchgen.stats import counted

_HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?/?", re.IGNORECASE)
_COPY = "refs/convert/parquet"
"""The branch in which the Hub keeps a Parquet copy of a dataset: CONFIG/SPLIT/0000.parquet."""
_SHARDED = re.compile(r"data/([^./][^/]*)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_BETWEEN = "[-._ 0-9]"
"""Characters that separate a word for a split from the rest of a name."""
_YAML_HEADER = re.compile(r"\s*---[ \t]*\r?\n")
_README = "README.md"
_NO_DATA = {_README, "config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip"}


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset whose files are known."""

    name: str
    """As the user wrote it."""
    root: str
    """The name of a file begins with it: `folder/`, or `hf://datasets/owner/name@commit/`."""
    files: Sequence[str]
    """All files, relative to `root`, sorted."""
    configs: Mapping[str, Mapping[str, Any]]
    """The configurations that the README.md declares; empty if it declares none."""

    def data_files(self, config: str | None, split: str | None, format: str | None) -> tuple[list[str], str]:
        """Returns the names of the chosen files, and a note that says what was chosen.

        `config` is None for the default one. `split` is one of its splits, several as in `train+test`, `all`, or None for the only one. Without a format, the files have one of the formats that batchgen reads, and the same one. Raises `UsageError` if the choice is
        not clear or the dataset does not have it.
        """
        config = self._config(config)
        splits = self._splits(self.configs.get(config, {}))
        if not splits:
            raise UsageError(f"{self.name} has no data files", "name its files, or a glob")
        chosen = self._chosen_splits(splits, split)
        found = list(dict.fromkeys(name for one in chosen for name in self._of_format(one, splits[one], format)))
        which = f"configuration {config}, " if len(self.configs) > 1 else ""
        note = f"{self.name}: {which}split {'+'.join(chosen)}, {counted(len(found), 'file')}"
        return [name if "://" in name else self.root + name for name in found], note

    def _config(self, config: str | None) -> str:
        names = list(self.configs) or ["default"]
        if config is not None:
            if config not in names:
                raise UsageError(
                    f"{self.name} has no configuration {config!r}",
                    f"use one of these with --dataset-config: {', '.join(names)}",
                )
            return config
        default = [n for n in names if len(names) == 1 or n == "default" or self.configs[n].get("default")]
        if not default:
            raise UsageError(
                f"{self.name} has several configurations", f"choose one with --dataset-config: {', '.join(names)}"
            )
        return default[0]

    def _splits(self, config: Mapping[str, Any]) -> dict[str, list[str]]:
        """Returns the files of each split of a configuration."""
        data_dir = posixpath.normpath(str(config.get("data_dir") or ""))
        folder = "" if data_dir == "." else f"{data_dir}/"
        declared = config.get("data_files")
        if declared is None:
            return self._splits_by_name(folder)
        try:
            patterns = _patterns(declared)
        except (TypeError, KeyError, AttributeError):
            raise UsageError(
                f"the configs of {self.name}/{_README} cannot be read: data_files is {declared!r}", "correct that file"
            ) from None
        return {
            split: [name for one in several for name in self._matching(one, folder)]
            for split, several in patterns.items()
        }

    def _splits_by_name(self, folder: str) -> dict[str, list[str]]:
        """Returns the files of each split of a folder without a configuration that names them."""
        inside = [name.removeprefix(folder) for name in self.files if name.startswith(folder)]
        sharded: dict[str, list[str]] = {}
        for name in inside:
            if match := _SHARDED.fullmatch(name):
                sharded.setdefault(match[1], []).append(folder + name)
        if sharded:
            return {split: sharded[split] for split in sorted(sharded, key=_place_of_split)}
        in_folder_name = {split: _in_folder_name(words) for split, words in _WORDS.items()}
        in_file_name = {split: _in_file_name(words) for split, words in _WORDS.items()}
        for patterns in (in_folder_name, in_file_name, {"train": ["**"]}):
            found = {s: [n for one in several for n in self._matching(one, folder)] for s, several in patterns.items()}
            if any(found.values()):
                return {split: names for split, names in found.items() if names}
        return {}

    def _matching(self, pattern: str, folder: str) -> list[str]:
        """Returns the files that match a pattern of a configuration, as `datasets` does: without hidden ones, unless the pattern names them."""
        from fsspec.utils import glob_translate

        if "://" in pattern:
            return [pattern]
        pattern = posixpath.normpath(folder + pattern)
        matches = re.compile(glob_translate(pattern)).match
        return [
            name
            for name in self.files
            if matches(name)
            and (posixpath.basename(name) not in _NO_DATA or posixpath.basename(name) == posixpath.basename(pattern))
            and _hidden(name.split("/")) == _hidden(pattern.split("/"))
            and _special(name.split("/")) == _special(pattern.split("/"))
        ]

    def _chosen_splits(self, splits: Mapping[str, list[str]], asked: str | None) -> list[str]:
        if asked == "all" or (asked is None and len(splits) == 1):
            return list(splits)
        names = ", ".join(splits)
        if asked is None:
            raise UsageError(f"{self.name} has several splits", f"choose with --split: {names}, or all")
        chosen = asked.split("+")
        for split in chosen:
            if split not in splits:
                raise UsageError(f"{self.name} has no split {split!r}", f"choose with --split: {names}, or all")
        return chosen

    def _of_format(self, split: str, names: Sequence[str], format: str | None) -> list[str]:
        formats = {name: split_name(name)[1] for name in names}
        if format is not None:
            found = [name for name, known in formats.items() if known in (format, None)]
        else:
            found = [name for name, known in formats.items() if known is not None]
        if not found:
            there = ", ".join(sorted({posixpath.splitext(name)[1] or "no suffix" for name in names}))
            copy = ""
            if _HUB.match(self.name):
                copy = f", or read the Hub's Parquet copy, {self.name.partition('@')[0]}@{_COPY}"
            raise UsageError(
                f"split {split} of {self.name} has no {format or ANY_FORMAT} file{f' (but {there})' if there else ''}",
                f"name the format with --input-format{copy}",
            )
        kinds = sorted({str(formats[name]) for name in found if formats[name]})
        if len(kinds) > 1:
            raise UsageError(
                f"split {split} of {self.name} has files of several formats: {', '.join(kinds)}",
                "choose one with --input-format",
            )
        return found


def find_dataset(name: str, *, chosen: bool) -> Dataset | None:
    """Returns the dataset that `name` means, or None if it means something else.

    That is a repository (`hf://datasets/OWNER/NAME`, with `@REVISION`), which is pinned to its present commit, and a folder on disk
    whose README.md declares configurations, that has files `data/SPLIT-00000-of-00001.*`, or of which a split or a configuration is `chosen`.
    Raises `UsageError` if the repository cannot be read, and for a folder of Arrow files that `save_to_disk` of `datasets` wrote.
    """
    if repository := _HUB.fullmatch(name):
        return _of_hub(name, repository[1], repository[2] and unquote(repository[2]))
    folder = Path(name)
    if "://" in name or not folder.is_dir():
        return None
    _refuse_saved(name, folder)
    readme = folder / _README
    header = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    configs = _declared(header, name)
    if not (chosen or configs or any(_SHARDED.fullmatch(f"data/{p.name}") for p in folder.glob("data/*-of-*"))):
        return None
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() or is_lost_link(p))
    return Dataset(name, f"{name.rstrip('/')}/", [f for f in files if not in_job_folder(f, folder)], configs)


def _refuse_saved(name: str, folder: Path) -> None:
    has_splits = (folder / "dataset_dict.json").is_file()
    if has_splits or all((folder / state).is_file() for state in ("state.json", "dataset_info.json")):
        split = "['SPLIT']" if has_splits else ""
        raise UsageError(
            f"{name} is a folder of Arrow files, which save_to_disk wrote",
            f"write it as Parquet first, in Python: datasets.load_from_disk({name!r}){split}.to_parquet('rows.parquet')",
        )


def _of_hub(name: str, repo: str, revision: str | None) -> Dataset:
    from huggingface_hub import HfApi

    if "?" in repo:
        raise UsageError(
            f"{name} is not the name of a dataset", "choose a part of it with --dataset-config and --split"
        )
    revision = _COPY if revision == "~parquet" else revision
    with reaching_hub(repo, revision=revision):
        hub = HfApi()
        commit = hub.repo_info(repo, repo_type="dataset", revision=revision).sha
        files = sorted(hub.list_repo_files(repo, repo_type="dataset", revision=commit))
        root = f"hf://datasets/{repo}@{commit}/"
        text = ""
        if _README in files:
            with open_remote(root + _README) as file:
                text = file.read().decode("utf-8", "replace")
    return Dataset(name, root, files, _of_copy(files) if revision == _COPY else _declared(text, name))


def _of_copy(files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the configurations of the Hub's Parquet copy."""
    configs: dict[str, dict[str, Any]] = {}
    for config, split, name in (parts for name in files if len(parts := name.split("/")) == 3):
        splits = configs.setdefault(config, {"data_files": {}})["data_files"]
        splits.setdefault(split, []).append(f"{config}/{split}/{name}")
    return configs


def _declared(readme: str, name: str) -> dict[str, dict[str, Any]]:
    """Returns the configurations in the header of a README.md. Raises `UsageError` if it has some and cannot be read."""
    if not _YAML_HEADER.match(readme) or "configs" not in readme:  # three dashes may also be a line of text
        return {}
    from huggingface_hub import DatasetCard

    try:
        configs = DatasetCard(readme).data.get("configs") or []
        return {str(config["config_name"]): config for config in configs}
    except Exception as e:
        raise UsageError(f"the header of {name}/{_README} cannot be read: {first_line(e)}", "correct that file") from e


def _patterns(declared: Any) -> dict[str, list[str]]:
    """Returns the patterns of each split of a `data_files` entry: text, a list of texts, or a list of splits with their paths."""
    if isinstance(declared, str):
        return {"train": [declared]}
    if isinstance(declared, Mapping):
        return {str(split): _texts(path) for split, path in declared.items()}
    if any(isinstance(item, Mapping) for item in declared):
        return {str(item["split"]): _texts(item["path"]) for item in declared}
    return {"train": _texts(declared)}


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{value!r} is not text")
    return texts


def _in_folder_name(words: Iterable[str]) -> list[str]:
    ends = ("/**", f"{_BETWEEN}*/**")
    return [f"**/{start}{word}{end}" for word in words for start in ("", f"*{_BETWEEN}") for end in ends]


def _in_file_name(words: Iterable[str]) -> list[str]:
    return [f"**/{start}{word}{_BETWEEN}*" for word in words for start in ("", f"*{_BETWEEN}")]


def _place_of_split(split: str) -> tuple[int, str]:
    known = list(_WORDS)
    return (known.index(split) if split in known else len(known)), split


def _hidden(parts: Sequence[str]) -> int:
    return sum(part.startswith(".") and set(part) != {"."} for part in parts)


def _special(parts: Sequence[str]) -> int:
    return sum(part.startswith("__") for part in parts[:-1])
