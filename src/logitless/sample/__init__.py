"""One token drawn per hidden state, with a record of the distribution that it came from."""

from ..vocab.face import Noise
from .record import SampleRecord
from .targets import TeacherTargets, read_targets
from .tokens import sample_tokens

__all__ = ["Noise", "SampleRecord", "TeacherTargets", "read_targets", "sample_tokens"]
