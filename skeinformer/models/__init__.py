"""Sketched attention in models of PyTorch: layers, conversion of existing models, calls of SDPA and scopes for them."""

from skeinformer.models.convert import Conversion, convert, restore
from skeinformer.models.layers import MultiheadAttention
from skeinformer.models.policy import Call, Policy, observe
from skeinformer.models.scope import Report, sketched
from skeinformer.models.sdpa import scaled_dot_product_attention

__all__ = [
    "Call",
    "Conversion",
    "MultiheadAttention",
    "Policy",
    "Report",
    "convert",
    "observe",
    "restore",
    "scaled_dot_product_attention",
    "sketched",
]
