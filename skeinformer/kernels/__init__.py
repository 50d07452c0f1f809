"""How attention is computed: the fused kernel, its normalizer and gradient, rows moved, scores by pieces.

Functions of plain tensors. Where there is a fast form, its plain form of the same signature stands beside it, and
`choice` decides which is taken. Outside of this package code asks `choice` only whether a condition is known, whether a
gradient is recorded, and for the precision of statistics.
"""
