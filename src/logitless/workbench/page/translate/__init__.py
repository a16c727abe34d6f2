"""Formulas for a page: Python functions and records as JavaScript, translated from their source."""

from .program import translate

__all__ = ["translate"]
