"""Every error logitless raises on purpose: what was expected, what was got, what to do, on one line."""

# What torch's allocators say, in errors that have a class of their own on GPUs only.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed")


class LogitlessError(Exception):
    """Base of all errors raised on purpose; each subclass is also the builtin error that people expect."""

    exit_status = 2  # of a command: bad input


class ShapeError(LogitlessError, ValueError):
    """Sizes that do not fit together, such as a head and hidden states of different widths."""


class DtypeError(LogitlessError, TypeError):
    """A tensor of a dtype that the operation cannot take, such as float labels."""


class DeviceError(LogitlessError, ValueError):
    """Tensors of one call on different devices."""


class LabelError(LogitlessError, ValueError):
    """A label, candidate or token id outside the vocabulary."""


class OptionError(LogitlessError, ValueError):
    """An option with a value that has no meaning, or that this call does not support."""


class BackendError(LogitlessError, RuntimeError):
    """A backend asked for by name that cannot run here."""


class GradientError(LogitlessError, RuntimeError):
    """A gradient that would be lost or is not defined, such as a double backward."""


class DataError(LogitlessError, ValueError):
    """A corpus or file that cannot be read or is too small."""


class ConfigError(LogitlessError, ValueError):
    """A model name, preset or configuration that does not exist or does not hold together."""


class NotFiniteError(LogitlessError, ArithmeticError):
    """NaN or infinity where numbers were expected, such as the hidden states of a model that diverged."""

    exit_status = 1  # the input was good, what came of it is not


class RankError(LogitlessError, RuntimeError):
    """Ranks of one process group that do not agree on a call, or one that no longer answers."""


def remote_error(kind: str, text: str) -> LogitlessError:
    """The error that another process raised, from the name of its class and its text."""
    return globals().get(kind, LogitlessError)(text)


def in_one_line(error: BaseException, most: int = 200) -> str:
    """What another library's error says, on one line of at most so many characters; its class where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory ran out."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)
