"""What the prompts of a window share: the prefix tree exact to the token, groups, and the figures of a plan.

Token ids only. Knows nothing about rows, text, memory or the model. Needs numpy, never torch.
"""

from batchgen.prefix.figures import carried_tokens, merge_figures, plan_figures
from batchgen.prefix.outline import GroupLine, GroupSurvey, Outline, PrefixOutline
from batchgen.prefix.reuse import resident_lengths
from batchgen.prefix.tree import PrefixNode, PrefixPlan, plan_prefixes, plan_requests

__all__ = [
    "GroupLine",
    "GroupSurvey",
    "Outline",
    "PrefixNode",
    "PrefixOutline",
    "PrefixPlan",
    "carried_tokens",
    "merge_figures",
    "plan_figures",
    "plan_prefixes",
    "plan_requests",
    "resident_lengths",
]
