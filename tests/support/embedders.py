"""Tiny Llamas with a sentence-transformers configuration or a classification head."""

import json
from pathlib import Path
from typing import Any

from support.tiny_model import save_tiny_llama, save_tiny_tokenizer, tiny_llama

QUERY = "Instruct: find what answers it\nQuery: "
_MODULES = {
    "": "sentence_transformers.models.Transformer",
    "1_Pooling": "sentence_transformers.models.Pooling",
    "2_Normalize": "sentence_transformers.models.Normalize",
}
LAST_TOKEN = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}


def save_embedder(
    folder: Path,
    *,
    pooling: dict[str, Any] | None = None,
    normalize: bool = True,
    prompt_name: str | None = None,
    chat: bool = False,
) -> Path:
    """Saves a tiny Llama with the files that sentence-transformers writes. `pooling` is the configuration of the pooling module."""
    save_tiny_llama(folder, chat=chat)
    places = [place for place in _MODULES if normalize or place != "2_Normalize"]
    modules = [{"idx": i, "name": str(i), "path": place, "type": _MODULES[place]} for i, place in enumerate(places)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    own = {"word_embedding_dimension": 64, **(pooling or LAST_TOKEN)}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(own))
    own = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": prompt_name}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    return folder


def save_classifier(folder: Path, labels: tuple[str, ...] = ("red", "green", "blue"), **config: Any) -> Path:
    """Saves a tiny random Llama with a classification head and a chat template."""
    import torch

    own = {"num_hidden_layers": 2, "id2label": dict(enumerate(labels))}
    model = tiny_llama("LlamaForSequenceClassification", **own | config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder, chat=True)
    return folder
