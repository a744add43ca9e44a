"""Replacing linear layers and embeddings of a model in place, and turning them back."""

from buttress.inspection.coverage import Unreached
from buttress.surgery.adapting import AdapterReport, adapt_
from buttress.surgery.choosing import chosen_layers
from buttress.surgery.densify import densify_
from buttress.surgery.entry import PlanEntry
from buttress.surgery.fusing import FusionReport, FusionRow, fuse_, unfuse_
from buttress.surgery.growing import GrownRow, GrowthReport, grow_
from buttress.surgery.merging import merge_, unadapt_
from buttress.surgery.plan import Plan
from buttress.surgery.quantizing import Quantization, quantize_
from buttress.surgery.replace import replace_
from buttress.surgery.report import ReplacedRow, Report
from buttress.surgery.shared_inputs import SharedInputRow

__all__ = [
    "AdapterReport",
    "FusionReport",
    "FusionRow",
    "GrownRow",
    "GrowthReport",
    "Plan",
    "PlanEntry",
    "Quantization",
    "ReplacedRow",
    "Report",
    "SharedInputRow",
    "Unreached",
    "adapt_",
    "chosen_layers",
    "densify_",
    "fuse_",
    "grow_",
    "merge_",
    "quantize_",
    "replace_",
    "unadapt_",
    "unfuse_",
]
