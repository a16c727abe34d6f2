"""Ranks that share a head's vocabulary: their collectives, and what they agree on before a call."""
