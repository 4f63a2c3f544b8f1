"""Codecs: how tensors are encoded for the network. Each codec is a small frozen value."""

from laconic.codecs.contract import Codec
from laconic.codecs.cosines import TopDCT
from laconic.codecs.exact import Cast, Exact
from laconic.codecs.feedback import ErrorFeedback
from laconic.codecs.low_rank import LowRank
from laconic.codecs.quantized import Quantized
from laconic.codecs.routing import ByName, ByShape
from laconic.codecs.sparse import TopK

__all__ = [
    "ByName",
    "ByShape",
    "Cast",
    "Codec",
    "ErrorFeedback",
    "Exact",
    "LowRank",
    "Quantized",
    "TopDCT",
    "TopK",
]
