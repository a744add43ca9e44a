"""Structures, one file each. Importing this package registers them."""

from buttress.core.structures.base import Structure, parse, structure, structures
from buttress.core.structures.blast import BLAST
from buttress.core.structures.block_diagonal import BlockDiagonal
from buttress.core.structures.btt import BTT
from buttress.core.structures.convolution import Convolution
from buttress.core.structures.dense import Dense, unstructured
from buttress.core.structures.kronecker import Kronecker
from buttress.core.structures.low_rank import LowRank
from buttress.core.structures.monarch import Monarch
from buttress.core.structures.sizes import split
from buttress.core.structures.sum import Sum, adapter
from buttress.core.structures.tensor_train import TensorTrain

__all__ = [
    "BLAST",
    "BTT",
    "BlockDiagonal",
    "Convolution",
    "Dense",
    "Kronecker",
    "LowRank",
    "Monarch",
    "Structure",
    "Sum",
    "TensorTrain",
    "adapter",
    "parse",
    "split",
    "structure",
    "structures",
    "unstructured",
]
