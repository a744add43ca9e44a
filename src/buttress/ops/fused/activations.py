"""The activations of `ops/activations.py` for the kernels. Imports triton.

They are computed in float32. ACTIVATION is a name, or None for no activation, which compiles to nothing. Constants come
after the tensors that they multiply, because the interpreter makes a constant of a product that begins with one.
"""

from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
"""sqrt(1 / 2)."""
NORMAL_DENSITY = tl.constexpr(0.3989422804014327)
"""1 / sqrt(2 pi), the density of a standard normal distribution at 0."""
TANH_SCALE = tl.constexpr(1.5957691216057308)
"""2 sqrt(2 / pi): the formula with tanh is x sigmoid(TANH_SCALE (x + TANH_CUBIC x^3))."""
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(b_x, ACTIVATION: tl.constexpr):
    """The activation of a tile, rounded to its dtype as a separate operation would round it."""
    if ACTIVATION is None:
        return b_x
    else:
        x = b_x.to(tl.float32)
        if ACTIVATION == "gelu":
            y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
        elif ACTIVATION == "gelu_tanh":
            y = x * _sigmoid((x + x * x * x * TANH_CUBIC) * TANH_SCALE)
        elif ACTIVATION == "silu":
            y = x * _sigmoid(x)
        else:
            tl.static_assert(ACTIVATION == "relu")
            y = tl.where(x <= 0.0, 0.0, x)  # NaN stays NaN
        return y.to(b_x.dtype)


@triton.jit
def derivative(b_x, ACTIVATION: tl.constexpr):
    """The derivative of the activation at the numbers of a tile, in float32."""
    x = b_x.to(tl.float32)
    if ACTIVATION == "gelu":
        return 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * NORMAL_DENSITY * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        s = _sigmoid((x + x * x * x * TANH_CUBIC) * TANH_SCALE)
        return s + x * s * (1.0 - s) * (1.0 + x * x * (3.0 * TANH_CUBIC)) * TANH_SCALE
    elif ACTIVATION == "silu":
        s = _sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.where(x <= 0.0, 0.0, 1.0)
