"""The layers, one idea per file."""

from .attention import AttentionState, DenseAttention, SelfAttention, SparseAttention
from .base import Chain, Dense, Layer, Stateless
from .cross_attention import CrossAttention, CrossAttentionState, SparseCrossAttention
from .experts import BlockFeedForward, SwitchFeedForward
from .feedforward import FeedForward, SparseFeedForward
from .module_conv import ModuleConv
from .multiplicative import MultiplicativeDense
from .positions import LearnedPositions, SinusoidalPositions
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
    "DenseUnembedding",
    "FeedForward",
    "Layer",
    "LearnedPositions",
    "ModuleConv",
    "MultiplicativeDense",
    "RecurrentBranch",
    "ReversibleStack",
    "Selector",
    "SelfAttention",
    "SinusoidalPositions",
    "SparseAttention",
    "SparseCrossAttention",
    "SparseFeedForward",
    "SparseUnembedding",
    "Stateless",
    "SwitchFeedForward",
    "in_chunks",
]
