"""Sketched attention in models of transformers: `attn_implementation="skein"`; see `skeinformer.models.huggingface`."""

from skeinformer.models.huggingface import extend_positions, register, sketch, watch

__all__ = ["extend_positions", "register", "sketch", "watch"]
