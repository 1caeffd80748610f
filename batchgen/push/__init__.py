"""The output of a job as a dataset on the Hub (`--push`). No torch, no model."""

from batchgen.push.upload import check_push, push_output

__all__ = ["check_push", "push_output"]
