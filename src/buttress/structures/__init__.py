"""Structures: one file each, holding nothing but its chain. Importing this package registers them."""

from buttress.structures.base import Structure, parse, split, structure, structures
from buttress.structures.block_diagonal import BlockDiagonal
from buttress.structures.btt import BTT
from buttress.structures.convolution import Convolution
from buttress.structures.dense import Dense
from buttress.structures.kronecker import Kronecker
from buttress.structures.low_rank import LowRank
from buttress.structures.monarch import Monarch
from buttress.structures.tensor_train import TensorTrain

__all__ = [
    "BTT",
    "BlockDiagonal",
    "Convolution",
    "Dense",
    "Kronecker",
    "LowRank",
    "Monarch",
    "Structure",
    "TensorTrain",
    "parse",
    "split",
    "structure",
    "structures",
]
