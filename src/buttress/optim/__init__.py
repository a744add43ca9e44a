"""Learning rates: parameter groups for torch optimizers, a table that explains them, and Muon for factors."""

from buttress.optim.explanation import Explanation, ParameterRow, explain
from buttress.optim.groups import param_groups
from buttress.optim.muon import Muon
from buttress.optim.orthogonalization import QUINTIC, minimax_coefficients, orthogonalize

__all__ = [
    "QUINTIC",
    "Explanation",
    "Muon",
    "ParameterRow",
    "explain",
    "minimax_coefficients",
    "orthogonalize",
    "param_groups",
]
