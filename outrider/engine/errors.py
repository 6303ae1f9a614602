"""What the engine refuses, by kind.

EngineError
├── UnsupportedModelError      the checkpoint cannot be served, with the reason
├── IncompleteCheckpointError  a file of it is missing or cut off
├── VocabularyMismatchError    draft and target do not read token ids alike
├── DeviceTooSmallError        weights or cache do not fit into the engine's part of its device
├── NoDeviceError              the device that it is to run on is not there
├── CacheTooSmallError         one sequence alone would not fit into the whole cache
├── SequenceFailedError        a step cannot go on with one sequence; the others are well
├── CacheLostError             what the cache holds is not certain any more: the engine is at its end
└── RankLostError              a process of the group is gone: the engine is at its end

A message that contradicts the sequence it names (a base beyond its length, a token outside the vocabulary) is
a plain ValueError: the sender is wrong, the engine is well.
"""


class EngineError(Exception):
    """Anything the engine refuses by itself."""


class UnsupportedModelError(EngineError):
    """The checkpoint's architecture cannot run on the paged cache."""


class IncompleteCheckpointError(EngineError):
    """A checkpoint folder lacks a file, or part of one."""


class VocabularyMismatchError(EngineError):
    """Draft and target have different tokenizers."""


class DeviceTooSmallError(EngineError):
    """What an engine is to hold does not fit into its part of a device."""


class NoDeviceError(EngineError):
    """The process sees no GPU, and was to take one."""


class CacheTooSmallError(EngineError):
    """A sequence may grow beyond what the whole cache holds."""


class SequenceFailedError(EngineError):
    """The engine cannot go on with one sequence, and has closed it. Says nothing of its text."""


class CacheLostError(EngineError):
    """A change of the cache was made in part."""


class RankLostError(EngineError):
    """Another rank of the group does not answer any more."""
