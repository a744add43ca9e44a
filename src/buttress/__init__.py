"""buttress: dense linear layers replaced by structured matrices that train well and run fast.

import buttress as bt

bt.replace_(model, bt.BTT(rank=2))
optimizer = torch.optim.AdamW(bt.param_groups(model, lr=3e-3))
"""

from importlib import import_module

from buttress.compression.allocation import Budget, Curves, budget, curves
from buttress.compression.distances import language_loss
from buttress.compression.distillation import Healing, HealingLosses, heal
from buttress.compression.input_moments import InputMoments, moments
from buttress.compression.judgement import DenseLayer
from buttress.compression.layer_options import Choice
from buttress.compression.options import CompressOptions
from buttress.compression.outcome import Outcome
from buttress.compression.pipeline import compress
from buttress.compression.remainder import Remainder
from buttress.core.chain import Chain, Factor
from buttress.core.chain_sum import ChainSum
from buttress.core.scaling import init_std, lr_multiplier
from buttress.core.structures import (
    BLAST,
    BTT,
    BlockDiagonal,
    Convolution,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    Sum,
    TensorTrain,
    parse,
    split,
    structure,
    structures,
)
from buttress.costs.advice import Advice, advise, calibrate, timed
from buttress.costs.counting import Cost, cost
from buttress.errors import (
    ButtressError,
    ChainError,
    MissingExtraError,
    PlanError,
    ReadOnlyError,
    RuleError,
    ShapeError,
    StructureError,
)
from buttress.integrations.adapter_folder import load_adapter_, save_adapter
from buttress.integrations.pretrained import from_pretrained
from buttress.nn.attention import ProjectedAttention
from buttress.nn.embedding import StructuredEmbedding
from buttress.nn.int8_linear import Int8Linear
from buttress.nn.linear import StructuredLinear
from buttress.nn.pointwise_conv import StructuredPointwiseConv
from buttress.nn.side_by_side import side_by_side
from buttress.nn.split_linear import SplitLinear
from buttress.ops import graphed
from buttress.optim import Explanation, explain, param_groups
from buttress.projection.closed_form import Projection, project
from buttress.surgery import (
    AdapterReport,
    FusionReport,
    GrowthReport,
    Plan,
    PlanEntry,
    Quantization,
    Report,
    Unreached,
    adapt_,
    densify_,
    fuse_,
    grow_,
    merge_,
    quantize_,
    replace_,
    unadapt_,
    unfuse_,
)
from buttress.surgery.config_entry import add_saving_hook
from buttress.surgery.matching import Match, match
from buttress.version import __version__ as __version__

# Surgery imports nothing of transformers; where a process has imported it, models save their plans by this.
add_saving_hook(lambda: import_module("buttress.hf"))

__all__ = [
    "AdapterReport",
    "Advice",
    "BLAST",
    "BTT",
    "BlockDiagonal",
    "Budget",
    "ButtressError",
    "Chain",
    "ChainError",
    "ChainSum",
    "Choice",
    "CompressOptions",
    "Convolution",
    "Cost",
    "Curves",
    "Dense",
    "DenseLayer",
    "Explanation",
    "Factor",
    "FusionReport",
    "GrowthReport",
    "Healing",
    "HealingLosses",
    "InputMoments",
    "Int8Linear",
    "Kronecker",
    "LowRank",
    "Match",
    "MissingExtraError",
    "Monarch",
    "Outcome",
    "Plan",
    "PlanEntry",
    "PlanError",
    "ProjectedAttention",
    "Projection",
    "Quantization",
    "ReadOnlyError",
    "Remainder",
    "Report",
    "RuleError",
    "ShapeError",
    "SplitLinear",
    "Structure",
    "StructureError",
    "StructuredEmbedding",
    "StructuredLinear",
    "StructuredPointwiseConv",
    "Sum",
    "TensorTrain",
    "Unreached",
    "adapt_",
    "advise",
    "budget",
    "calibrate",
    "compress",
    "cost",
    "curves",
    "densify_",
    "explain",
    "from_pretrained",
    "fuse_",
    "graphed",
    "grow_",
    "heal",
    "init_std",
    "language_loss",
    "load_adapter_",
    "lr_multiplier",
    "match",
    "merge_",
    "moments",
    "param_groups",
    "parse",
    "project",
    "quantize_",
    "replace_",
    "save_adapter",
    "side_by_side",
    "split",
    "structure",
    "structures",
    "timed",
    "unadapt_",
    "unfuse_",
]
