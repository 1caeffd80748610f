"""Whether the hub answers, and in one line why a model cannot be loaded from it or from a folder. Loads nothing itself."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from batchgen.config import ModelConfig
from batchgen.errors import ModelError, caused_by, first_line
from batchgen.model_files import LOCAL, find_file, read_json

_logger = logging.getLogger("batchgen")

_ANSWER_SECONDS = 10.0


def asked(config: ModelConfig) -> Exception | None:
    """Asks the hub for a model. Returns the error; None if it has the model."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(config.model, revision=config.revision, timeout=_ANSWER_SECONDS)
    except Exception as e:  # noqa: BLE001 - the library of requests differs with the version
        return e
    return None


def prefer_cache_if_unreachable(config: ModelConfig) -> None:
    """Turns the offline mode of huggingface_hub on, for this process and its children, if the hub gives no answer and the model is in its cache.

    Otherwise each file that a model may lack (there are about seven) would be asked for six times, which takes minutes.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    name = config.model
    if constants.HF_HUB_OFFLINE or Path(name).exists() or find_file(config, "config.json", fetch=False) is None:
        return
    error = asked(config)
    if error is not None and not isinstance(error, HfHubHTTPError):  # which is an answer
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        _logger.warning(
            "the hub cannot be reached (%s): the files of %s are those of the local cache", first_line(error), name
        )


def load_failure(config: ModelConfig, what: str, error: BaseException) -> ModelError:
    """Returns the `ModelError` for an exception that a library raised while it loaded `what` (configuration, tokenizer…)."""
    if "trust_remote_code" in str(error):
        return ModelError(
            f"the {what} of model {config.model!r} needs Python code that comes with the model",
            f"read the .py files {_code_place(config)} and add --trust-remote-code if you trust them, or use a checkpoint that needs no code",
        )
    if needed := re.search(r"requires the ([\w-]+) library but it was not found", str(error)):
        package = needed[1].lower()
        return ModelError(f"the {what} of model {config.model!r} needs the package {package}", f"pip install {package}")
    if unknown := re.search(r"has model type `([^`]*)` but Transformers does not recognize", str(error)):
        import transformers

        return ModelError(
            f"transformers {transformers.__version__} does not know models of type {unknown[1]!r}",
            "install a newer transformers, or use another model",
        )
    if Path(config.model).is_dir():
        for name in ("tokenizer.json", "tokenizer_config.json") if what == "tokenizer" else ():
            if (Path(config.model) / name).exists():
                read_json(Path(config.model) / name)  # raises what is wrong with the file itself
        return _unreadable(config, what, error)
    return _hub_failure(config, error) or _unreadable(config, what, error)


def _code_place(config: ModelConfig) -> str:
    if Path(config.model).is_dir():
        return f"in {config.model}"
    from huggingface_hub.constants import ENDPOINT

    return f"at {ENDPOINT}/{config.model}/tree/{config.revision or 'main'}"


def _unreadable(config: ModelConfig, what: str, error: BaseException) -> ModelError:
    if "Couldn't instantiate the backend tokenizer" in str(error):
        return ModelError(
            f"model {config.model!r} has no tokenizer.json, and no other tokenizer files that can be read here",
            "add tokenizer.json, or install the package that its files are for (sentencepiece or tiktoken)",
        )
    if "tiktoken" in str(error) and list(Path(config.model).glob("*.model")):  # transformers tries tiktoken last
        return ModelError(
            f"model {config.model!r} has no tokenizer.json, and its tokenizer cannot be read here",
            "add tokenizer.json, or pip install sentencepiece protobuf (or tiktoken, if its file is one of tiktoken's)",
        )
    why = f"it has no {first_line(error)}" if isinstance(error, KeyError) else first_line(error)
    return ModelError(f"the {what} of model {config.model!r} cannot be loaded: {why}")


def _hub_failure(config: ModelConfig, error: BaseException) -> ModelError | None:
    from huggingface_hub import errors as hub

    model = config.model
    if caused_by(error, hub.HFValidationError):
        return ModelError(
            f"model {model!r} is neither a folder nor a hub name", f"{LOCAL}, or a hub name such as org/model"
        )
    if caused_by(error, hub.RevisionNotFoundError):
        return ModelError(
            f"model {model!r} has no revision {config.revision!r} on the hub",
            "give a branch, a tag or a commit of it, or leave --revision out",
        )
    if caused_by(error, hub.GatedRepoError):
        return ModelError(
            f"model {model!r} is gated, and you have no access to it",
            f"ask for access on its page and log in with `hf auth login`, or {LOCAL}",
        )
    if caused_by(error, hub.RepositoryNotFoundError):
        return ModelError(
            f"model {model!r} is neither a folder here nor a model on the hub",
            f"check the name (a private model needs `hf auth login`), or {LOCAL}",
        )
    if caused_by(error, hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        at = "" if config.revision is None else f" at revision {config.revision!r}"
        return ModelError(
            f"model {model!r}{at} is neither a folder here nor in the local cache, and the hub cannot be reached",
            f"check the connection and HF_HUB_OFFLINE, or {LOCAL}",
        )
    return None
