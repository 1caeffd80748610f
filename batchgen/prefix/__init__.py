"""What a window's prompts share: chunk hashes, groups, the prefix tree exact to the token, the plan and its figures.

Token ids only: knows nothing of rows, text, pages in memory or the model. Needs numpy, never torch.
"""

from batchgen.prefix.figures import (
    PlanFigures,
    carried_tokens,
    merge_figures,
    plan_figures,
)
from batchgen.prefix.groups import Group
from batchgen.prefix.hashing import chunk_hashes
from batchgen.prefix.overlap import Resident, node_paths, resident_lengths
from batchgen.prefix.survey import GroupLine, NodeLine, Survey
from batchgen.prefix.tree import PrefixNode, PrefixPlan, plan_prefixes

__all__ = [
    "Group",
    "GroupLine",
    "NodeLine",
    "PlanFigures",
    "PrefixNode",
    "PrefixPlan",
    "Resident",
    "Survey",
    "carried_tokens",
    "chunk_hashes",
    "merge_figures",
    "node_paths",
    "plan_figures",
    "plan_prefixes",
    "resident_lengths",
]
