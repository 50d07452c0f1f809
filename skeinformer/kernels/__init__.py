"""How attention is computed: the fused kernel, its normalizer and gradient, rows moved, scores by pieces.

Functions of plain tensors. Where there is a fast form, its plain form of the same signature stands beside it, and
`choice` decides which is taken; nothing outside of this package asks.
"""
