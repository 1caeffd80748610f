"""The model's outputs of requests that are embedded or classified: after the prompt's last token, or their mean over all tokens.

A mean is a sum that each prefix node adds up once. Texts below the node continue from its sum, as they continue from its KV.
"""

from __future__ import annotations

import numpy as np
import torch

from batchgen.kernels.transfer import put
from batchgen.scheduling.batch import ScheduledBatch
from batchgen.scheduling.sequence import PrefixNodeSpan, Span

AT_ONCE = 1 << 22
"""Number of outputs that are converted to float64 at once."""


@torch.inference_mode()
def last_outputs(outputs: torch.Tensor, batch: ScheduledBatch) -> torch.Tensor:
    """Returns the outputs [entries, width] in float32, by entry of the batch's `score_targets`. `outputs` [N, width] are the batch's rows."""
    rows = put(np.array(batch.score_targets.rows, dtype=np.int64), outputs.device)
    return outputs[rows].float()


@torch.inference_mode()
def mean_outputs(outputs: torch.Tensor, batch: ScheduledBatch, at_once: int = AT_ONCE) -> torch.Tensor:
    """Returns the means [entries, width] in float32, by entry of the batch's `score_targets`, and keeps the sums of unfinished prefixes.

    `outputs` [N, width] are those after every token of the batch. They are added in float64 (float32 on MPS), one token after the other, so a
    sum does not depend on where spans and steps begin.
    """
    device = outputs.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    spans = batch.spans
    counts = [scheduled.stop - scheduled.start for scheduled in spans]
    owner = np.repeat(np.arange(len(spans)), counts)
    owners = put(owner, device)
    totals = torch.stack([_total(scheduled.span, outputs.shape[1], dtype, device) for scheduled in spans])
    size = max(1, at_once // outputs.shape[1])
    for start in range(0, len(outputs), size):
        totals.index_add_(0, owners[start : start + size], outputs[start : start + size].to(dtype))
    for scheduled, total in zip(spans, totals, strict=True):
        span = scheduled.span
        span.source = None
        if isinstance(span, PrefixNodeSpan) or scheduled.stop < span.end:
            span.total = total.clone()  # the others' memory is not kept for it
    of = owner[batch.score_targets.rows]
    lengths = np.array([scheduled.stop for scheduled in spans], dtype=np.int64)[of]
    return (totals[put(of, device)] / put(lengths, device)[:, None]).float()


def _total(span: Span, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The sum [width] of the outputs after the tokens that the span has computed."""
    if span.total is None and span.source is not None:
        total = _total(span.source, width, dtype, device)
        if isinstance(span, PrefixNodeSpan) and span.complete:  # taken over whole, so it never runs
            span.total, span.source = total, None
        return total
    return torch.zeros(width, dtype=dtype, device=device) if span.total is None else span.total
