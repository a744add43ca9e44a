"""buttress: dense linear layers replaced by structured matrices that train well and run fast.

import buttress as bt

bt.replace_(model, bt.BTT(rank=2))
optimizer = torch.optim.AdamW(bt.param_groups(model, lr=3e-3))
"""

from buttress.advise import Advice, advise, calibrate, timed
from buttress.attention import ProjectedAttention, SplitLinear
from buttress.budget import Budget, Choice, budget, curves
from buttress.chain import Chain, Factor
from buttress.cost import Cost, cost
from buttress.embedding import StructuredEmbedding
from buttress.errors import (
    ButtressError,
    ChainError,
    MissingExtraError,
    PlanError,
    RuleError,
    ShapeError,
    StructureError,
)
from buttress.heal import Healing, heal
from buttress.layer import StructuredLinear
from buttress.moments import moments
from buttress.ops import graphed
from buttress.optim import Explanation, explain, param_groups
from buttress.project import Projection, project
from buttress.scaling import init_std, lr_multiplier
from buttress.structures import (
    BTT,
    BlockDiagonal,
    Convolution,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    TensorTrain,
    parse,
    split,
    structure,
    structures,
)
from buttress.surgery import Plan, PlanEntry, Report, densify_, replace_

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "BTT",
    "BlockDiagonal",
    "Budget",
    "ButtressError",
    "Chain",
    "ChainError",
    "Choice",
    "Convolution",
    "Cost",
    "Dense",
    "Explanation",
    "Factor",
    "Healing",
    "Kronecker",
    "LowRank",
    "MissingExtraError",
    "Monarch",
    "Plan",
    "PlanEntry",
    "PlanError",
    "ProjectedAttention",
    "Projection",
    "Report",
    "RuleError",
    "ShapeError",
    "SplitLinear",
    "Structure",
    "StructureError",
    "StructuredEmbedding",
    "StructuredLinear",
    "TensorTrain",
    "advise",
    "budget",
    "calibrate",
    "cost",
    "curves",
    "densify_",
    "explain",
    "graphed",
    "heal",
    "init_std",
    "lr_multiplier",
    "moments",
    "param_groups",
    "parse",
    "project",
    "replace_",
    "split",
    "structure",
    "structures",
    "timed",
]
