"""Attention where queries and keys are shares of a sequence, and other ranks hold the rest."""
