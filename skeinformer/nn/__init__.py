"""Sketched attention in models of torch: layers, models converted and restored, calls of SDPA and scopes of them."""

from skeinformer.nn.attention import MultiheadAttention
from skeinformer.nn.convert import Conversion, convert, restore
from skeinformer.nn.decision import worth_sketching
from skeinformer.nn.functional import scaled_dot_product_attention
from skeinformer.nn.report import Report
from skeinformer.nn.scope import sketched
from skeinformer.nn.verdict import Choice, Verdict

__all__ = [
    "Choice",
    "Conversion",
    "MultiheadAttention",
    "Report",
    "Verdict",
    "convert",
    "restore",
    "scaled_dot_product_attention",
    "sketched",
    "worth_sketching",
]
