"""Mistakes in the on-chip kernels, which the tests run on an emulated GPU, and in what launches them."""

from __future__ import annotations

from mutants.mutation import Mutation

KERNELS = ("tests/ops/on_chip/test_launches.py",)
PASSES = ("tests/ops/fused/test_on_chip_passes.py",)
OPTIONS = ("tests/ops/on_chip/test_options.py",)
COMPILING = ("tests/ops/on_chip/test_compiling.py",)
SIZES = ("tests/ops/on_chip/test_sizes.py",)

MUTATIONS = (
    Mutation(
        "no barrier before z is read",
        "ops/on_chip/apply.cu",
        "      BARRIER();\n      if (PREFETCH)",
        "      if (PREFETCH)",
        KERNELS,
    ),
    Mutation(
        "both buffers of z are one",
        "ops/on_chip/apply.cu",
        "if (BUFFERS > 1) buffer ^= 1;",
        "",
        KERNELS,
    ),
    Mutation(
        "padding of z not set to zero",
        "ops/on_chip/apply.cu",
        "z_units[i] = uint4{0, 0, 0, 0};",
        ";",
        KERNELS,
    ),
    Mutation(
        "z not scaled",
        "ops/on_chip/apply.cu",
        "pack(acc[2 * half] * s1, acc[2 * half + 1] * s1)",
        "pack(acc[2 * half], acc[2 * half + 1])",
        KERNELS,
    ),
    Mutation(
        "tokens behind the last are read",
        "ops/on_chip/apply.cu",
        "token < n_tokens ? end : 0",
        "end",
        KERNELS,
    ),
    Mutation(
        "z stored in another order than the weights",
        "ops/on_chip/apply.cu",
        "(chunk * CHUNK2 + lane % 4 * LANE2 + number) ^ z_shift(b)",
        "chunk * CHUNK2 + lane % 4 * LANE2 + number",
        KERNELS,
    ),
    Mutation(
        "tokens behind the last are written",
        "ops/on_chip/apply.cu",
        "if (first_m + m >= M_TILES || token >= n_tokens) continue;",
        "if (first_m + m >= M_TILES) continue;",
        KERNELS,
    ),
    Mutation(
        "transposed weights packed as they are",
        "ops/on_chip/apply.cu",
        "TRANSPOSED ? (b * K2 + k) * A + a : (b * A + a) * K2 + k",
        "(b * A + a) * K2 + k",
        KERNELS,
    ),
    Mutation(
        "padding of weights not set to zero",
        "ops/on_chip/apply.cu",
        "const bool inside = b < B && k < D;",
        "const bool inside = b < B;",
        KERNELS,
    ),
    Mutation(
        "numbers of a block read beyond its end",
        "ops/on_chip/device.cuh",
        "    const bool inside = column + i < end;",
        "    const bool inside = column < end;",
        KERNELS,
    ),
    Mutation(
        "no barrier between the products of the weight gradients",
        "ops/on_chip/gradients.cu",
        "    BARRIER();\n    accumulate<C_GROUP",
        "    accumulate<C_GROUP",
        KERNELS,
    ),
    Mutation(
        "tiles overwritten while they are read",
        "ops/on_chip/gradients.cu",
        "    BARRIER();\n    x_copy.store(x_tile);",
        "    x_copy.store(x_tile);",
        KERNELS,
    ),
    Mutation(
        "all lanes of the first factor write to one place",
        "ops/on_chip/gradients.cu",
        "sums1 + lane * (C * B * S * D)",
        "sums1",
        KERNELS,
    ),
    Mutation(
        "dz not scaled",
        "ops/on_chip/gradients.cu",
        "AP, DY_STRIDE>(weights2, dy_tile, dz, s2)",
        "AP, DY_STRIDE>(weights2, dy_tile, dz, s1)",
        KERNELS,
    ),
    Mutation(
        "rows that pad dz not set to zero",
        "ops/on_chip/gradients.cu",
        "reinterpret_cast<uint4*>(dz)[i] = uint4{0, 0, 0, 0};",
        ";",
        KERNELS,
        equivalent="a row of dz or z only enters the same row of a sum, and rows that pad are not written",
    ),
    Mutation(
        "gradient of x with the factors in order",
        "ops/fused/on_chip_passes.py",
        "launches.apply(sizes.transposed, options, dy, weights[::-1], scales[::-1], None, transposed=True)",
        "launches.apply(sizes.transposed, options, dy, weights, scales, None, transposed=True)",
        PASSES,
    ),
    Mutation(
        "gradient of x with the scales in order",
        "ops/fused/on_chip_passes.py",
        "weights[::-1], scales[::-1]",
        "weights[::-1], scales",
        PASSES,
    ),
    Mutation(
        "z saved although it stays on the chip",
        "ops/fused/autograd.py",
        "learns and not recompute and not kept_on_chip()",
        "learns and not recompute",
        PASSES,
    ),
    Mutation(
        "options that do not fit are used",
        "ops/on_chip/options.py",
        "forward if forward and forward.fits(sizes, shared_limit) else None",
        "forward",
        PASSES,
    ),
    Mutation(
        "unaligned tensors taken for aligned",
        "ops/fused/on_chip_passes.py",
        "t.data_ptr() % 16",
        "t.data_ptr() % 2",
        PASSES,
    ),
    Mutation(
        "options adopted although they give wrong numbers",
        "ops/measuring.py",
        "            if wrong:",
        "            if False:",
        ("tests/ops/test_measuring.py",),
    ),
    Mutation(
        "shared memory of other GPUs taken for an H200's",
        "ops/on_chip/options.py",
        "_can_share(self.programs, self.shared_bytes(sizes), shared_limit)",
        "_can_share(self.programs, self.shared_bytes(sizes), MAX_SHARED_BYTES)",
        OPTIONS,
    ),
    Mutation(
        "compiled code of one architecture used for another",
        "ops/on_chip/compiling.py",
        'f"{architecture} {_compiler()} {STANDARD}\\n{text}"',
        'f"{_compiler()} {STANDARD}\\n{text}"',
        COMPILING,
    ),
    Mutation(
        "damaged code loaded",
        "ops/on_chip/compiling.py",
        "return code if hashlib.sha256(code).digest() == digest else None",
        "return code",
        COMPILING,
    ),
    Mutation(
        "chains with another order taken for pairs",
        "ops/on_chip/sizes.py",
        "return sizes if strided == _strided(sizes) else None",
        "return sizes",
        SIZES,
    ),
)
