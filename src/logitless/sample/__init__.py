"""One token drawn per hidden state, with a record of the distribution that it came from."""

from ..vocab.noise import Noise
from .record import SampleRecord
from .tokens import sample_tokens

__all__ = ["Noise", "SampleRecord", "sample_tokens"]
