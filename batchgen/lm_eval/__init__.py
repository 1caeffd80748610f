"""The model `batchgen` of EleutherAI's lm-evaluation-harness. Needs the extra `lm-eval`.

python -m batchgen.lm_eval --model batchgen --model_args pretrained=org/name --tasks hellaswag --num_fewshot 10

The harness has no entry points for models of other packages, so `python -m batchgen.lm_eval` is its own command `lm_eval` with this model added.
A program that imports this package can name the model too: `lm_eval.simple_evaluate(model="batchgen", ...)`.
"""

try:
    import lm_eval.models  # noqa: F401 - the harness adds its own models only while there are no others
except ModuleNotFoundError as e:
    if e.name != "lm_eval":
        raise
    raise ModuleNotFoundError("lm_eval is not installed: pip install 'batchgen-llm[lm-eval]'", name="lm_eval") from None

from batchgen.lm_eval.model import BatchgenLM

__all__ = ["BatchgenLM"]
