"""Pushes a finished output to the Hub, as a dataset: Parquet files, and a card by which a later push recognises its own.

All files arrive in one commit. Nothing is pushed if the repository holds this output already, so after a failed push the same command
can be repeated.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config import JobConfig
from batchgen.errors import BatchgenError, OutputError, OutputLocked, UsageError
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.manifest import DIGEST, Manifest, load_manifest
from batchgen.jobs.opening import PUSH_FOLDER
from batchgen.jobs.shards import CLAIMS
from batchgen.push.card import MARK, SPLIT, dataset_card
from batchgen.records.hub_errors import reaching_hub
from batchgen.records.output import job_path, output_format
from batchgen.records.parquet_types import without_maps
from batchgen.records.remote import is_url, open_remote
from batchgen.stats import counted

SHARD_BYTES = 500_000_000
"""Size from which an output is pushed in several files, as `datasets` does."""
_README = "README.md"
_GIT_FILES = {".gitattributes", ".gitignore"}


def repo_of(name: str) -> str:
    """Returns `OWNER/NAME` for the value of `--push`, which may also be `hf://datasets/OWNER/NAME`."""
    repo = name.removeprefix("hf://").removeprefix("datasets/").rstrip("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"--push {name!r} is not the name of a dataset on the hub", "use OWNER/NAME")
    return repo


def check_push(config: JobConfig, output: str) -> None:
    """Raises `UsageError` if `output` could not be pushed at the end, as far as that can be checked beforehand: its format, the token, the repository."""
    if config.push is None:
        return
    repo = repo_of(config.push)
    if is_url(output) or output == "-" or output_format(output)[0] != "parquet":
        raise UsageError(
            f"--push needs a Parquet file on this machine, and the output is {output}", "name a .parquet file with -o"
        )
    from huggingface_hub import HfApi

    hub = HfApi()
    with reaching_hub(repo):
        role = ((hub.whoami().get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise UsageError(f"the token can only read, and --push writes to dataset {repo}", "use a token that may write")
    strange = _dataset_files(repo) - _GIT_FILES
    if strange and MARK not in _card_of(repo, strange) and not config.overwrite:
        raise UsageError(
            f"dataset {repo} has files that batchgen did not push ({', '.join(sorted(strange)[:3])})",
            "use another name with --push, or delete them there; --overwrite replaces them, but also starts the job again",
        )


def push_output(config: JobConfig, output: str, stats: Mapping[str, Any], tell: Callable[[str], None]) -> str:
    """Pushes the finished output and returns the dataset's address. Does nothing if it is there already.

    Holds the job's lease. Raises `OutputLocked` if another process runs the job or pushes its output, and `OutputError` if the push fails; the
    output itself is complete then.
    """
    assert config.push is not None
    repo = repo_of(config.push)
    folder = job_path(output, config.work_dir)
    manifest = load_manifest(folder / "manifest.json")
    assert manifest is not None, "a finished job has a manifest"
    try:
        lease = Lease(folder / CLAIMS, output, tell, unsharded=True)
        try:
            with reaching_hub(repo, error=OutputError):
                return _push(config, repo, Path(output), manifest, stats, folder / PUSH_FOLDER, tell)
        finally:
            shutil.rmtree(folder / PUSH_FOLDER, ignore_errors=True)
            lease.release()
    except OutputLocked:
        raise
    except (BatchgenError, OSError) as e:
        message, hint = (e.message, e.hint) if isinstance(e, BatchgenError) else (str(e), "free some space")
        command = "the same command without --overwrite" if config.overwrite else "the same command"
        raise OutputError(
            f"{output} is complete, but it could not be pushed: {message}",
            f"{hint}; {command} then pushes it, and generates nothing",
        ) from e


def _push(
    config: JobConfig,
    repo: str,
    output: Path,
    manifest: Manifest,
    stats: Mapping[str, Any],
    folder: Path,
    tell: Callable[[str], None],
) -> str:
    """`folder`: for files on their way."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    hub = HfApi()
    address = str(hub.create_repo(repo, repo_type="dataset", private=not config.push_public, exist_ok=True))
    if config.push_public and hub.repo_info(repo, repo_type="dataset").private:
        tell(f"{address} stays private, as it was before: make it public in its settings")
    digest, there = manifest.outputs[0][DIGEST], _dataset_files(repo)
    earlier = {name for name in there if name.startswith(f"data/{SPLIT}-")}
    if earlier and f"{MARK}{digest}" in _card_of(repo, there):
        tell(f"{address} has this output already")
        return address
    tell(f"pushing {output} to {address}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shards = parquet_shards(output, folder)
    names = [f"data/{SPLIT}-{place:05}-of-{len(shards):05}.parquet" for place in range(len(shards))]
    metadata = [pq.read_metadata(shard) for shard in shards]
    rows = sum(part.num_rows for part in metadata)
    schema = pq.read_schema(shards[0])
    card = dataset_card(config, repo, digest, stats=stats, settings=manifest.settings, schema=schema, rows=rows)
    operations: list[Any] = [
        *(CommitOperationAdd(name, str(shard)) for name, shard in zip(names, shards, strict=True)),
        CommitOperationAdd(_README, card.encode()),
        *(CommitOperationDelete(name) for name in sorted(earlier - {*names})),
    ]
    done = hub.create_commit(
        repo,
        operations,
        repo_type="dataset",
        commit_message=f"batchgen: {counted(rows, 'row')} of {config.model.model.rstrip('/').rpartition('/')[2]}",
    )
    tell(f"pushed {counted(rows, 'row')} in {counted(len(shards), 'file')}: {done.commit_url}")
    return address


def _dataset_files(repo: str) -> set[str]:
    """Returns the files of a dataset; none if it does not exist."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    with reaching_hub(repo):
        try:
            return set(HfApi().list_repo_files(repo, repo_type="dataset"))
        except RepositoryNotFoundError:
            return set()


def _card_of(repo: str, there: set[str]) -> str:
    """Returns the text of the dataset's card; empty if it is not among the files that are `there`."""
    from huggingface_hub import HfApi

    if _README not in there:
        return ""
    commit = HfApi().repo_info(repo, repo_type="dataset").sha
    with open_remote(f"hf://datasets/{repo}@{commit}/{_README}") as file:
        return file.read().decode("utf-8", "replace")


def parquet_shards(output: Path, folder: Path, max_bytes: int = SHARD_BYTES) -> Sequence[Path]:
    """Returns Parquet files with the rows of `output`: itself, if it is small, else files of about `max_bytes` in `folder`.

    A map becomes a list of its entries (`key`, `value`), because `datasets` reads no maps. One row group is in memory at a time.
    """
    file = pq.ParquetFile(output)
    fields = [field.with_type(without_maps(field.type)) for field in file.schema_arrow]
    schema = pa.schema(fields, metadata=file.schema_arrow.metadata)
    if schema == file.schema_arrow and output.stat().st_size <= max_bytes:
        return [output]
    shards: list[Path] = []
    writer: pq.ParquetWriter | None = None
    for group in range(file.num_row_groups):
        if writer is None:
            shards.append(folder / f"{len(shards)}.parquet")
            writer = pq.ParquetWriter(shards[-1], schema, compression="zstd")
        table = file.read_row_group(group, use_threads=False).cast(schema)
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        if shards[-1].stat().st_size >= max_bytes:
            writer.close()
            writer = None
    if not shards:
        pq.write_table(schema.empty_table(), folder / "0.parquet")
        return [folder / "0.parquet"]
    if writer is not None:
        writer.close()
    return shards
