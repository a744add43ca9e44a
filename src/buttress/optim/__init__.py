"""Learning rates: parameter groups for torch optimizers, and a table that explains them."""

from buttress.optim.explanation import Explanation, ParameterRow, explain
from buttress.optim.groups import param_groups

__all__ = ["Explanation", "ParameterRow", "explain", "param_groups"]
