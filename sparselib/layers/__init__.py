"""The layers, one idea per file."""

from ..config import LSHSizes
from .attention import AttentionState, DenseAttention, SelfAttention, SparseAttention
from .base import Chain, Dense, Layer, Stateless
from .cross_attention import CrossAttention, CrossAttentionState, SparseCrossAttention
from .experts import BlockFeedForward, SwitchFeedForward
from .feedforward import FeedForward, SparseFeedForward
from .lsh import lsh_attend
from .lsh_attention import DenseLSHAttention, LSHAttention, LSHState, SparseLSHAttention
from .module_conv import ModuleConv
from .multiplicative import MultiplicativeDense
from .positions import LearnedPositions, ShiftedPositions, SinusoidalPositions
from .recurrence import SRU, RecurrentBranch
from .reversible import ReversibleStack, in_chunks
from .selector import Selector
from .unembedding import DenseUnembedding, SparseUnembedding

__all__ = [
    "SRU",
    "AttentionState",
    "BlockFeedForward",
    "Chain",
    "CrossAttention",
    "CrossAttentionState",
    "Dense",
    "DenseAttention",
    "DenseLSHAttention",
    "DenseUnembedding",
    "FeedForward",
    "LSHAttention",
    "LSHSizes",
    "LSHState",
    "Layer",
    "LearnedPositions",
    "ModuleConv",
    "MultiplicativeDense",
    "RecurrentBranch",
    "ReversibleStack",
    "Selector",
    "SelfAttention",
    "ShiftedPositions",
    "SinusoidalPositions",
    "SparseAttention",
    "SparseCrossAttention",
    "SparseFeedForward",
    "SparseLSHAttention",
    "SparseUnembedding",
    "Stateless",
    "SwitchFeedForward",
    "in_chunks",
    "lsh_attend",
]
