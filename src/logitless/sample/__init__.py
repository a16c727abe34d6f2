"""One token drawn per hidden state, with a record of the distribution that it came from."""

from ..vocab.face import Noise, SamplingMask
from .record import SampleRecord
from .targets import TeacherTargets, read_targets
from .teacher import TeacherRecord, TeacherRows
from .tokens import sample_tokens

__all__ = [
    "Noise",
    "SampleRecord",
    "SamplingMask",
    "TeacherRecord",
    "TeacherRows",
    "TeacherTargets",
    "read_targets",
    "sample_tokens",
]
