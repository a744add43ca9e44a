"""Which parameters of dense modules are matrices, which of their axes are summed, and how to read them as stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from buttress.inspection.names import is_conv1d

Layout = tuple[Literal["stack", "rows", "columns"], int]
"""How a parameter is read as a stack of matrices: the arrangement, and the number of parts.

- ("stack", 1): the last two dimensions are the matrix. (in, out) serves as well as (out, in).
- ("rows", n): n matrices below each other, each with all dimensions but the first as columns.
- ("columns", 1): one matrix whose second dimension has the rows, as in a transposed convolution.
"""

STACK: Layout = ("stack", 1)


def to_stack(t: Tensor, layout: Layout) -> Tensor:
    """Read a parameter as a stack of matrices.

    Args:
        t: The parameter, or a tensor of its shape.
        layout: Its layout.

    Shape:
        Returns (matrices, rows, columns).
    """
    kind, parts = layout
    match kind:
        case "stack":
            return t.reshape(-1, *t.shape[-2:])
        case "rows":
            return t.reshape(parts, t.shape[0] // parts, -1)
        case "columns":
            return t.transpose(0, 1).reshape(1, t.shape[1], -1)


def from_stack(stack: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """The inverse of `to_stack`.

    Args:
        stack: The stack.
        shape: Shape of the parameter.
        layout: Its layout.
    """
    if layout[0] == "columns":
        d_in, d_out, *kernel = shape
        return stack.reshape(d_out, d_in, *kernel).transpose(0, 1)
    return stack.reshape(shape)


@dataclass(frozen=True)
class DenseMatrix:
    """A parameter that is a matrix applied to features, or a stack of them.

    Attributes:
        kind: Description, for `explain`.
        d_in: How many numbers are summed for each output.
        d_out: Number of outputs.
        part: Name in the module, if the module has several matrices; else empty.
        layout: How it is read as a stack of matrices; None if it should not be orthogonalized.
    """

    kind: str
    d_in: int
    d_out: int
    part: str = ""
    layout: Layout | None = STACK


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
        gates: Layout = ("rows", p.shape[0] // outputs)
        return DenseMatrix("recurrent", d_in=p.shape[1], d_out=outputs, part=key, layout=gates)
    if isinstance(module, nn.Bilinear) and key == "weight":
        kind = "bilinear: sums over pairs of inputs"
        return DenseMatrix(kind, d_in=p[0].numel(), d_out=p.shape[0], layout=("rows", 1))
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
    # The groups of a convolution are many small matrices, in the extreme one row per channel.
    layout: Layout | None = ("columns" if module.transposed else "rows", 1) if module.groups == 1 else None
    if module.transposed:  # stored as (in, out, ...)
        d_in, d_out = p[:, 0].numel() // module.groups, p.shape[1] * module.groups
    else:
        d_in, d_out = p[0].numel(), p.shape[0]
    return DenseMatrix(kind="convolution", d_in=d_in, d_out=d_out, layout=layout)


def _attention(key: str, p: nn.Parameter) -> DenseMatrix:
    d_out, d_in = p.shape
    if key == "in_proj_weight":  # three matrices in one
        return DenseMatrix("dense (attention)", d_in=d_in, d_out=d_out // 3, layout=("rows", 3))
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
