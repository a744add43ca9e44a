"""The paper's formulas written out by hand: numpy, explicit loops and sums, nothing from the library.

Every function takes factors as the library stores them, (blocks, d_out, d_in), and returns the dense
matrix of the padded sizes. References: Qiu et al., "Compute Better Spent" (2024), sections 2-3 and the
appendix "General Expression for Tensor-Train and Block Tensor-Train".
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def dense(w: Array) -> Array:
    """One block."""
    return w[0]


def low_rank(v: Array, u: Array) -> Array:
    """U V, summed over the rank by hand."""
    total = np.zeros((u.shape[1], v.shape[2]))
    for r in range(v.shape[1]):
        total += np.outer(u[0, :, r], v[0, r])
    return total


def kronecker(right: Array, left: Array) -> Array:
    """L kron R."""
    return np.kron(left[0], right[0])


def tensor_train_two(right: Array, left: Array, b: int, c: int) -> Array:
    """sum_s L_s kron R_s; R is stored (b s, d) with s fast, L (a, c s) with s fast."""
    s = right.shape[1] // b
    r = right[0].reshape(b, s, -1)
    l = left[0].reshape(-1, c, s)
    return sum(np.kron(l[:, :, k], r[:, k, :]) for k in range(s))


def btt_two(right: Array, left: Array) -> Array:
    """y[b, a] = sum_{c, s} L[b, a, c, s] sum_d R[c, b, s, d] x[c, d], rows ordered (b, a), columns (c, d).

    R is stored (c, b s, d) with b slow and s fast, L (b, a, c s) with c slow and s fast.
    """
    n_c, _, n_d = right.shape
    n_b, n_a, _ = left.shape
    n_s = right.shape[1] // n_b
    w = np.zeros((n_b * n_a, n_c * n_d))
    for b, a, c, d in product(range(n_b), range(n_a), range(n_c), range(n_d)):
        for s in range(n_s):
            w[b * n_a + a, c * n_d + d] += left[b, a, c * n_s + s] * right[c, b * n_s + s, d]
    return w


def flat(index: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Row-major position."""
    place = 0
    for i, n in zip(index, sizes, strict=True):
        place = place * n + i
    return place


def train(
    cores: list[Array], m: tuple[int, ...], n: tuple[int, ...], r: tuple[int, ...], *, blocks: bool, rows: str
) -> Array:
    """T[i; j] = sum over alpha of prod_t G_t[alpha_{t-1}, i_t, (i_{t+1}, .., i_c); (j_1, .., j_{t-1},) j_t, alpha_t].

    `cores` is G_1 .. G_c; m, n are the sizes of the output and input axes 1 .. c and r those of
    alpha_1 .. alpha_{c-1}. `blocks` adds the axes in parentheses: Block Tensor-Train. G_t is stored
    (j_1..j_{t-1} i_{t+1}..i_c | i_t alpha_{t-1} | j_t alpha_t). Rows are ordered (i_1, .., i_c) for
    rows="natural" and (i_2, .., i_c, i_1) for rows="last made last".
    """
    count = len(cores)
    bond = (1, *r, 1)
    w = np.zeros((prod(m), prod(n)))
    alphas = list(product(*(range(k) for k in bond)))
    for i in product(*(range(k) for k in m)):
        row = flat(i, m) if rows == "natural" else flat((*i[1:], i[0]), (*m[1:], m[0]))
        for j in product(*(range(k) for k in n)):
            entry = 0.0
            for alpha in alphas:
                term = 1.0
                for t in range(1, count + 1):
                    block = flat((*j[: t - 1], *i[t:]), (*n[: t - 1], *m[t:])) if blocks else 0
                    out = i[t - 1] * bond[t - 1] + alpha[t - 1]
                    into = j[t - 1] * bond[t] + alpha[t]
                    term *= cores[t - 1][block, out, into]
                entry += term
            w[row, flat(j, n)] = entry
    return w


def block_diagonal(w: Array) -> Array:
    """Blocks along the diagonal."""
    blocks, e, d = w.shape
    out = np.zeros((blocks * e, blocks * d))
    for g in range(blocks):
        out[g * e : (g + 1) * e, g * d : (g + 1) * d] = w[g]
    return out


def blast(v: Array, s: Array, u: Array) -> Array:
    """Block (i, j) is U_i diag(s_ij) V_j^T (Lee et al., 2024, equation 1).

    V is stored as V_j^T (j, r, q), S as (r, i, j), U as U_i (i, p, r); blocks are slow on both sides.
    """
    return np.block(
        [[u[i] @ np.diag(s[:, i, j]) @ v[j] for j in range(v.shape[0])] for i in range(u.shape[0])],
    )


def monarch(right: Array, left: Array) -> Array:
    """The authors' rule: entry j of stage one goes to block j mod b of stage two, at position j div b.

    Input (block, position) and output (block, position), blocks slow on both sides.
    """
    b, q, _ = right.shape
    shuffle = np.zeros((b * q, b * q))
    for j in range(b * q):
        shuffle[(j % b) * q + j // b, j] = 1
    return block_diagonal(left) @ shuffle @ block_diagonal(right)


def interleave(blocks: int, each: int) -> list[int]:
    """Where (block, position) with the block slow lands when the position is slow instead."""
    return [(k % each) * blocks + k // each for k in range(blocks * each)]


def convolution(kernel: Array, n: int, c: int) -> Array:
    """y[e, i] = sum_{c, w} K[e, c, w] x[c, (i + w - size // 2) mod n]; rows (e, i), columns (c, i)."""
    channels = kernel.shape[1]
    size = kernel.shape[2] // c
    out = np.zeros((channels * n, c * n))
    for e, i, k, w in product(range(channels), range(n), range(c), range(size)):
        out[e * n + i, k * n + (i + w - size // 2) % n] += kernel[0, e, k * size + w]
    return out


def weight_normalized(m: Array, std: float, gain: float) -> Array:
    """gain * M / max(1, RMS(M) / std), the RMS over the whole tensor."""
    rms = np.sqrt(np.mean(m**2))
    return gain * m / max(1.0, rms / std)


def svd_tail(matrix: Array, rank: int) -> float:
    """Sum of squares of the singular values beyond `rank`: what Eckart and Young say must be lost."""
    return float(np.sum(np.linalg.svd(matrix, compute_uv=False)[rank:] ** 2))
