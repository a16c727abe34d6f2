"""Measured memory, under the names that training knows."""

from ..memory.resident import Watch, free_bytes, peak_bytes, reset_peak, thin

__all__ = ["Watch", "free_bytes", "peak_bytes", "reset_peak", "thin"]
