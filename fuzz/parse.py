"""Texts of structures: `parse` gives a structure or a StructureError, and a layer is built or refused."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch

import buttress as bt
from fuzz.cases import Area, Case, Failure, only
from fuzz.mutations import CHARACTERS, EXTREMES, mutate_text

VALID = (
    "dense", "btt", "btt(rank=4)", "btt(rank=(2, 3), cores=3)", "btt(cores=3)", "tensor_train(rank=8)",
    "tensor_train(rank=(1, 2, 3), cores=4)", "low_rank", "low_rank(rank=7)", "low_rank(fraction=0.25)", "kronecker",
    "btt(split='greedy')", "btt(rank=2, split=((3, 4), (4, 8)))", "tensor_train(cores=3, split='greedy')",
    "kronecker(split=((4, 4), (8, 8)))", "monarch(blocks=4)", "block_diagonal(blocks=3)", "convolution(kernel_size=5)",
)  # fmt: skip
TOKENS = (
    "btt", "low_rank", "dense", "(", ")", "rank", "cores", "split", "fraction", "=", ",", "1", "0", "-1", "10**9",
    "1e999", "nan", "None", "True", "{[]:1}", "{{}}", "[]", "()", "(1,)", "*", "**", "lambda:0", "x:=1", "...", "'a'",
    "'greedy'", "b'a'", "f'{1}'", "0x" + "f" * 50, "9" * 30, "9" * 4400, "1_000", "1j", "not", "if", "else", "for",
    ":", "\n", "#", "\\", "__import__('os')",
)  # fmt: skip
SIZES = (1, 2, 3, 4, 5, 7, 12, 13, 16, 31, 64, 97)
EXTREME_SIZES = (0, -1, 2**20, 2**31 - 1, 2**40 - 87, 2**40, 2**40 + 1, 10**18 + 3, 10**40)


def random_text(random: Random) -> str:
    """A text that is a structure, nearly one, or nothing at all."""
    kind = random.random()
    if kind < 0.5:
        text = random.choice(VALID)
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            text = mutate_text(text, random)
        return text
    if kind < 0.75:
        name = random.choice(("btt", "low_rank", "tensor_train", "monarch", "block_diagonal", "convolution", "dense"))
        option = random.choice(("rank", "cores", "fraction", "blocks", "kernel_size", "split", "name", "chain"))
        value = random.choice(
            (*EXTREMES, random.randint(-3, 200), 10 ** random.randint(1, 60), (1, 2), {1}, b"a", random_axes(random))
        )
        return f"{name}({option}={value!r})"
    if kind < 0.9:
        return "".join(random.choices(TOKENS, k=random.randint(1, 12)))
    return "".join(random.choices(CHARACTERS, k=random.randint(0, 60)))


def random_axes(random: Random) -> tuple[tuple[object, ...], ...]:
    """The axes of an explicit split, or nearly."""

    def axis() -> object:
        return random.choice((*EXTREMES, 2**20, 2**40)) if random.random() < 0.1 else random.randint(1, 9)

    sides = random.choice((2, 2, 2, 2, 1, 3))
    return tuple(tuple(axis() for _ in range(random.choice((2, 2, 2, 3, 0, 200)))) for _ in range(sides))


def run_case(case: Case) -> None:
    random = case.random
    text = random_text(random)
    with only(bt.StructureError):
        structure = bt.parse(text)
    if bt.parse(str(structure)) != structure:
        raise Failure(f"{structure!r} is not read back from {str(structure)!r}")
    if random.random() < 0.2:
        structure.chain(*(random.choice(SIZES + EXTREME_SIZES) for _ in range(2)))
        return
    d_in, d_out = random.choice(SIZES), random.choice(SIZES)
    layer = bt.StructuredLinear(d_in, d_out, structure)
    if layer(torch.ones(2, d_in)).shape != (2, d_out):
        raise Failure("a layer has another shape")


def prepare(folder: Path) -> None:
    """Nothing is needed."""


AREA = Area("parse", 9000, 10.0, prepare, run_case)
