"""Writes docs/models.md: the architectures that are verified, what their tests cover, and those that are refused.

Run it after a change to batchgen/model/architectures.py or tests/support/shapes.py: python docs/make_models_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "models.md"
TEXT = """# Models

{verified} architectures of transformers are verified. For each, random models with every kind of layer of the architecture are compared with `generate`, which runs one prompt at a time. The greedy tokens are equal, and every logit agrees up to the rounding of float32. batchgen runs all
prompts together, and also with prefill in slices, little memory and preemption. This was tested on transformers {versions} (`tests/parity/test_every_architecture.py`).
Of the {decoders} decoder-only text architectures of transformers {newest} that declare support for attention backends, {exact} are verified. {refused} model types are refused by name, with the reason, before any weights are loaded. A model type that is in no table is checked when it is loaded, with a small model of the same class, and refused if a single logit differs.

Most checkpoints of this year are multimodal. transformers {newest} has {wrappers} multimodal classes around a language model with its own configuration (`text_config`). {wrapped} of them are verified for text, and {others} more that have another structure. They are compared with
the `generate` of the whole multimodal model, with the vision and audio settings that transformers has by default (`tests/parity/test_wrappers.py`). Only the language model is loaded. {seen} of them are also shown [images](images.md). The other classes are in the table of refusals. [will-my-model-run.md](will-my-model-run.md) lists families by their names.

Models with recurrent layers (gated delta rule, Mamba, lightning attention, RG-LRU, short convolutions) share prefixes as all other models do: see [recurrent.md](recurrent.md).

BLOOM, CodeGen, Falcon, GPT-J, GPT-Neo and MPT have attention code of their own in transformers. batchgen replaces it. An encoder with a decoder (T5, BART, Whisper) is refused, whatever its name.

DeepSeek V3.2, GLM 5, Qwen 3.8 Flash Next, MiniMax M3, Mistral Large 4, Hy 4, dots3-note and A.X K2 have an indexer that chooses which keys a query sees. Up to a certain length (2,048 tokens in published checkpoints) it chooses all of them, and batchgen ends the context there. The dynamic mask of Doge keeps every key up to `keep_window_size` tokens, where batchgen ends the context too; Doge with experts is refused.

Rotary embeddings of the kinds plain, partial, linear, proportional, Llama 3 and YaRN are exact, and so are absolute positions. LongRoPE (Phi 3.5 and 4 mini) has short factors and, for texts of more than `original_max_position_embeddings` tokens, long ones; transformers
chooses by the longest text of a batch, batchgen for each row. A row whose prompt is longer has the long factors from its beginning. One that becomes longer while it is written runs again from its beginning with the long factors and goes on, as in Phi 3's `generate` of transformers 5.24. In 5.17, and for other classes, `generate` goes on with the keys of the short factors: there, such a row has what the model gives for the whole text, which is not what `generate` writes. Rows with different factors share no prefix, and do not run in one step. In PhiMoE, in code of
a model's own (`--trust-remote-code`), and in models with dynamic NTK, whose frequencies change with every length beyond `max_position_embeddings`, the context ends where they would change. Other kinds are refused.

A model of a verified architecture is refused if its configuration asks for something that is not verified: a kind of layer with which the family was not tested, or attention in both directions (`use_bidirectional_attention`).

This page is written by `docs/make_models_table.py`; a test compares the two.

## Verified: {verified}

| `model_type` | tested with |
| --- | --- |
{verified_rows}

## Multimodal checkpoints, verified for text: {multimodal}

| `model_type` | language model tested inside | shown images |
| --- | --- | --- |
{wrapper_rows}

A verified wrapper around another verified language model (`llava` around `qwen2`, say) counts as verified too.

## Refused: {refused}

| `model_type` | because |
| --- | --- |
{refused_rows}
"""


def page() -> str:
    """The whole of docs/models.md."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from batchgen.model.architectures import REFUSED, VERIFIED, VERIFIED_ON, WRAPPERS
    from batchgen.prompts.images import FAMILIES
    from support.features import candidates, features_of_all
    from support.wrappers import TEXTS, with_text_config

    features = features_of_all()
    decoders = {name for name in candidates() if "encoders" not in REFUSED.get(name, "")}
    return TEXT.format(
        verified=len(VERIFIED),
        refused=len(REFUSED),
        decoders=len(decoders),
        exact=len(decoders & VERIFIED),
        wrappers=len(with_text_config()),
        wrapped=len(with_text_config() & WRAPPERS),
        others=len(WRAPPERS - with_text_config()),
        seen=len(WRAPPERS & FAMILIES.keys()),
        multimodal=len(WRAPPERS),
        wrapper_rows="\n".join(
            f"| `{name}` | {f'`{TEXTS[name][0]}`' if TEXTS[name][0] else 'its own'} | {'yes' if name in FAMILIES else ''} |"
            for name in sorted(WRAPPERS)
        ),
        newest=VERIFIED_ON[-1],
        versions=" and ".join(VERIFIED_ON),
        verified_rows="\n".join(
            f"| `{name}` | {', '.join(features[name]) or 'plain attention'} |" for name in sorted(VERIFIED)
        ),
        refused_rows="\n".join(f"| `{name}` | {REFUSED[name]} |" for name in sorted(REFUSED)),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
