"""Small texts, the token folders that are written from them, and what is in those."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from buttress.lab.data import tokens

END = "<|endoftext|>"
AWKWARD = [
    "plain words, and some more of them.",
    f"a special {END} inside of a line, and{END}again",
    "It's 'quoted', they'll've 12345 numbers",
    "  leading and trailing  \n\n\n  and\tblank\n\n",
    "naïve café, 東京は大きい。 😀🏳️‍🌈 \u00a0\u3000\u2028 \x00\x1f end",
    "def f(x):\n    return x  # code\r\n\r\n",
]
"""Texts that are hard to split or to tokenize."""


def corpus(seed: int, count: int) -> list[str]:
    """Documents of random words, and one with special characters."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 8))) for _ in range(300)]
    texts = [
        "\n".join(" ".join(draw.choices(words, k=draw.randint(3, 20))) for _ in range(draw.randint(1, 12)))
        for _ in range(count)
    ]
    return [*texts, f"the end of them {seed}: é 東京 {END} x"]


def joined(texts: list[str], separator: str = END) -> str:
    return "".join(f"{text}\n{separator}\n" for text in texts)


def split_up(folder: tokens.Tokens, split: str) -> list[str]:
    """The documents of a split, one by one."""
    ids = np.asarray(getattr(folder, split))
    ends = np.flatnonzero(ids == folder.end)
    assert ends[-1] == len(ids) - 1, "every document ends with the end-of-text token"
    return [folder.decode(part[:-1]) for part in np.split(ids, ends + 1)[:-1]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_corpus(path: Path) -> Path:
    """A text file with 201 documents."""
    path.write_text(joined(corpus(0, 200)), encoding="utf-8")
    return path


def write(text: Path, out: Path, **options: object) -> tokens.Tokens:
    """A token folder with a small trained tokenizer and a tenth of the documents for validation."""
    return tokens.write([text], out, **({"tokenizer": "train:300", "val": 0.1} | options))  # type: ignore[arg-type]


def write_tales(root: Path) -> Path:
    """A data folder with a little corpus of random sentences called "tales"."""
    rng = random.Random(0)
    nouns, verbs = ("the cat", "a dog", "the old king", "my neighbour", "rain"), ("sees", "follows", "forgets", "likes")

    def tale() -> str:
        return " ".join(f"{rng.choice(nouns)} {rng.choice(verbs)} {rng.choice(nouns)}." for _ in range(12))

    for name, count in (("train", 150), ("val", 30)):
        (root / f"{name}.txt").write_text("\n<|endoftext|>\n".join(tale() for _ in range(count)))
    tokens.write([root / "train.txt"], root / "tales", val=root / "val.txt", tokenizer="train:300")
    return root
