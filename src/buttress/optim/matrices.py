"""Which parameters of dense modules are matrices, and which of their axes are summed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from buttress.inspection.names import is_conv1d


@dataclass(frozen=True)
class DenseMatrix:
    """A parameter that is a matrix applied to features, or a stack of them.

    Attributes:
        kind: Description, for `explain`.
        d_in: How many numbers are summed for each output.
        d_out: Number of outputs.
        part: Name in the module, if the module has several matrices; else empty.
    """

    kind: str
    d_in: int
    d_out: int
    part: str = ""


def dense_matrix(module: nn.Module, key: str, p: nn.Parameter) -> DenseMatrix | None:
    """The matrix that a parameter is.

    Args:
        module: The module that owns the parameter.
        key: The parameter's name in the module.
        p: The parameter.

    Returns:
        Its sizes; None for a vector, a table, or a parameter whose use cannot be told.
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or is_vector(key, p):
        return None
    if isinstance(module, nn.Linear) and key == "weight":
        return DenseMatrix(kind="dense", d_in=p.shape[1], d_out=p.shape[0])
    if is_conv1d(module) and key == "weight":
        return DenseMatrix("dense (Conv1D)", d_in=p.shape[0], d_out=p.shape[1])
    if isinstance(module, nn.modules.conv._ConvNd) and key == "weight":
        return _convolution(module, p)
    if isinstance(module, nn.MultiheadAttention) and key.endswith("proj_weight"):
        return _attention(key, p)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        outputs = p.shape[0] if key.startswith("weight_hr") else module.hidden_size  # the gates are stacked
        return DenseMatrix("recurrent", d_in=p.shape[1], d_out=outputs, part=key)
    if isinstance(module, nn.Bilinear) and key == "weight":
        return DenseMatrix("bilinear: sums over pairs of inputs", d_in=p[0].numel(), d_out=p.shape[0])
    if p.dim() == 3:
        return _experts(module, key, p)
    if p.dim() == 2 and key == "weight" and "Embedding" not in type(module).__name__:
        return DenseMatrix(f"{type(module).__name__}: taken for (out, in)", d_in=p.shape[1], d_out=p.shape[0])
    return None


def is_vector(key: str, p: nn.Parameter) -> bool:
    """Whether each number of a parameter belongs to one feature alone.

    That holds where at most one axis is longer than 1, for biases (one row per expert), and for the logarithms of
    decay rates in state space models (A_log).
    """
    if key == "weight":
        return p.dim() <= 1
    return p.dim() <= 1 or p.numel() == max(p.shape) or key == "bias" or key.endswith(("_bias", "_log"))


def _convolution(module: nn.modules.conv._ConvNd, p: nn.Parameter) -> DenseMatrix:
    if module.transposed:  # stored as (in, out, ...)
        return DenseMatrix(kind="convolution", d_in=p[:, 0].numel() // module.groups, d_out=p.shape[1] * module.groups)
    return DenseMatrix(kind="convolution", d_in=p[0].numel(), d_out=p.shape[0])


def _attention(key: str, p: nn.Parameter) -> DenseMatrix:
    d_out, d_in = p.shape
    if key == "in_proj_weight":  # three matrices in one
        return DenseMatrix("dense (attention)", d_in=d_in, d_out=d_out // 3)
    # q_proj_weight corresponds to the weight of q_proj in a ProjectedAttention
    return DenseMatrix("dense (attention)", d_in=d_in, d_out=d_out, part=key.removesuffix("_weight"))


def _experts(module: nn.Module, key: str, p: nn.Parameter) -> DenseMatrix | None:
    """A stack of matrices, one per expert."""
    transposed = _is_transposed(module, key, p)
    if transposed is None:
        return None
    _, rows, columns = p.shape
    d_in, d_out = (rows, columns) if transposed else (columns, rows)
    order = "in, out" if transposed else "out, in"
    return DenseMatrix(f"experts, each ({order})", d_in=d_in, d_out=d_out, part=key)


def _is_transposed(module: nn.Module, key: str, p: nn.Parameter) -> bool | None:
    """Whether a stack of matrices is stored as (experts, in, out); None if that cannot be told."""
    if isinstance(flag := getattr(module, "is_transposed", None), bool):  # of transformers
        return flag
    _, rows, columns = p.shape
    for d_in, d_out in (("in_features", "out_features"), ("input_size", "output_size")):
        sizes = getattr(module, d_in, None), getattr(module, d_out, None)
        if rows != columns and sizes in ((rows, columns), (columns, rows)):
            return sizes == (rows, columns)
    bias = getattr(module, f"{key}_bias", None)
    if isinstance(bias, nn.Parameter) and rows != columns and bias.shape[-1] in (rows, columns):
        return bias.shape[-1] == columns
    return _is_transposed_by_use(module)


def _is_transposed_by_use(module: nn.Module) -> bool | None:
    """Of two stacks, the first feeds the second, through a gate if it has twice as many outputs."""
    stacks = [q.shape for _, q in module.named_parameters(recurse=False) if q.dim() == 3]
    if len(stacks) != 2 or stacks[0][0] != stacks[1][0]:
        return None
    (_, up_rows, up_columns), (_, down_rows, down_columns) = stacks
    fits = up_columns == down_rows and up_rows in (down_columns, 2 * down_columns)
    fits_transposed = up_rows == down_columns and up_columns in (down_rows, 2 * down_rows)
    return fits_transposed if fits != fits_transposed else None
