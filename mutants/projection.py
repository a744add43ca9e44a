"""Mistakes in projecting a dense matrix."""

from __future__ import annotations

from mutants.mutation import Mutation

TESTS = ("tests/projection/test_closed_form.py", "tests/projection/test_refinement.py")
COUPLED = tuple(f"tests/projection/test_{name}.py" for name in ("splitting", "diagonalization", "joint_step"))

MUTATIONS = (
    Mutation(
        "the roots of the singular values lost",
        "projection/splitting.py",
        "rest = (left * root[:, None, :] ** 2)",
        "rest = (left * root[:, None, :])",
        TESTS,
    ),
    Mutation(
        "a sum over shared entries instead of their mean",
        "projection/closed_form.py",
        "tensor = tensor / copies.clamp_min(1)",
        "tensor = tensor / 1",
        TESTS,
    ),
    Mutation(
        "whitened factors kept where they are worse",
        "projection/closed_form.py",
        "return min((tensors, without_moments), key=lambda",
        "return max((tensors, without_moments), key=lambda",
        TESTS,
    ),
    Mutation(
        "inputs that are always zero not replaced",
        "projection/closed_form.py",
        "block_moments.diagonal(dim1=-2, dim2=-1)[empty] = 1",
        "block_moments.diagonal(dim1=-2, dim2=-1)[empty] = 0",
        TESTS,
    ),
    Mutation(
        "output error relative to the weight",
        "projection/closed_form.py",
        "_norm_ratio(difference @ target.root, target.weight @ target.root)",
        "_norm_ratio(difference @ target.root, target.weight)",
        TESTS,
    ),
    Mutation(
        "factors not balanced",
        "projection/closed_form.py",
        "tensors = balanced(draft.tensors, [init_std(f) for f in draft.chain.factors])",
        "tensors = draft.tensors",
        TESTS,
    ),
    Mutation(
        "no sweeps with moments",
        "projection/closed_form.py",
        "sweeps = SWEEPS if moments is not None or target.chain(structure).coupled_bonds else 0",
        "sweeps = 0",
        TESTS,
    ),
    Mutation(
        "earlier sweeps repeated",
        "projection/closed_form.py",
        "inputs, sweeps - start.sweeps)",
        "inputs, sweeps)",
        TESTS,
    ),
    Mutation(
        "shared blocks counted as one block",
        "projection/closed_form.py",
        "first.blocks == first.shared == 1",
        "first.blocks == 1",
        TESTS,
    ),
    Mutation(
        "window of the projection shifted for even kernels",
        "projection/closed_form.py",
        "torch.arange(size) - size // 2) % ring",
        "torch.arange(size) - (size - 1) // 2) % ring",
        TESTS,
    ),
    Mutation(
        "the largest useful rank refused",
        "projection/splitting.py",
        "if chain.size(cut.bond) > (full := min(blocks.shape[1:])):",
        "if chain.size(cut.bond) >= (full := min(blocks.shape[1:])):",
        TESTS,
    ),
    Mutation(
        "one term too few between regrouped blocks",
        "projection/closed_form.py",
        "truncated_svd(submatrices, int(term.max()) + 1)",
        "truncated_svd(submatrices, max(1, int(term.max())))",
        TESTS,
    ),
    Mutation(
        "damping ignored",
        "projection/refinement.py",
        "(wide + wide.mT) / 2 + damping * eye",
        "(wide + wide.mT) / 2 + 1e-6 * eye",
        TESTS,
    ),
    Mutation(
        "a sweep that is worse is kept",
        "projection/refinement.py",
        "        if not distance < least:\n            return Refinement(best, converged=True)\n",
        "",
        TESTS,
    ),
    Mutation(
        "ratio of conjugate gradients inverted",
        "projection/refinement.py",
        "(norm / previous_norm) * direction",
        "(previous_norm / norm) * direction",
        TESTS,
    ),
    Mutation(
        "coupled bonds split as others",
        "core/chain.py",
        "for f in self.factors) > 2)",
        "for f in self.factors) > 3)",
        COUPLED,
    ),
    Mutation(
        "the first candidate of a split instead of the nearest",
        "projection/closed_form.py",
        "if not chain.coupled_bonds:\n        return next(candidates)",
        "if True:\n        return next(candidates)",
        COUPLED,
    ),
    Mutation(
        "eigenvectors in any order",
        "projection/diagonalization.py",
        "order = torch.argsort(values.real + 1e-9 * values.imag, dim=-1)",
        "order = torch.argsort(vectors.real[..., 0, :], dim=-1)",
        COUPLED,
    ),
    Mutation(
        "whitening not undone",
        "projection/diagonalization.py",
        "torch.linalg.solve_ex(whitening @ right, column_space)",
        "torch.linalg.solve_ex(right, column_space)",
        COUPLED,
    ),
    Mutation(
        "a step of all factors together that is worse is taken",
        "projection/joint_step.py",
        "            if distance < least:\n",
        "            if True:\n",
        COUPLED,
    ),
    Mutation(
        "no step of all factors together",
        "projection/refinement.py",
        "        if chain.coupled_bonds:\n",
        "        if False:\n",
        COUPLED,
    ),
    Mutation(
        "the damping of a joint step left out of its gradient",
        "projection/joint_step.py",
        "g - step_size * (c + d * p)",
        "g - step_size * c",
        COUPLED,
    ),
)
