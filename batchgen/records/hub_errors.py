"""Turns what huggingface_hub raises into errors of one line that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchgen.errors import BatchgenError, UsageError, caused_by, causes_of, in_one_line

_GIVE_TOKEN = "set HF_TOKEN or run `hf auth login`"


@contextmanager
def reaching_hub(repo: str, *, revision: str | None = None, error: type[BatchgenError] = UsageError) -> Iterator[None]:
    """Raises an `error` that names the dataset `repo` (`owner/name`) for whatever goes wrong with the hub inside."""
    try:
        yield
    except BatchgenError:
        raise
    except Exception as e:
        message, hint = _explained(repo, revision, e)
        raise error(message, hint) from e


def _explained(repo: str, revision: str | None, error: BaseException) -> tuple[str, str]:
    from huggingface_hub import errors as hub

    answer = next((c for c in causes_of(error) if isinstance(c, hub.HfHubHTTPError)), None)
    status = answer.response.status_code if answer else None
    reason = " ".join(((answer and answer.server_message) or "").split())[:300]
    if caused_by(error, hub.HFValidationError):
        return f"{repo!r} is not the name of a dataset on the hub", "use OWNER/NAME"
    if caused_by(error, hub.RevisionNotFoundError):
        return f"dataset {repo} has no revision {revision!r}", "use a branch, a tag or a commit of it"
    if caused_by(error, hub.GatedRepoError):
        return f"dataset {repo} is gated, and you have no access to it", f"ask for access on its page and {_GIVE_TOKEN}"
    if caused_by(error, hub.LocalTokenNotFoundError) or status == 401:
        return f"dataset {repo} needs a token of the hub", _GIVE_TOKEN
    if caused_by(error, hub.RepositoryNotFoundError):
        return f"there is no dataset {repo} on the hub", f"check the name; for a private dataset, {_GIVE_TOKEN}"
    if status == 403:  # also where the owner's storage is full
        said = f" (the hub says: {reason})" if reason else ""
        return f"the token gives no access to dataset {repo}{said}", "use a token that has the permission"
    if caused_by(error, hub.OfflineModeIsEnabled):
        return f"dataset {repo} is on the hub, and HF_HUB_OFFLINE is set", "unset it, or name a local copy"
    return (
        f"dataset {repo}: the hub failed: {reason or in_one_line(answer or error, 300) or type(error).__name__}",
        "check the connection and run the same command again",
    )
