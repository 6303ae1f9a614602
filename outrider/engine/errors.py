"""Errors of the engine, by kind.

EngineError
├── UnsupportedModelError      the checkpoint cannot be served, with the reason
├── IncompleteCheckpointError  a file of it is missing or cut off
├── VocabularyMismatchError    draft and target do not read token ids alike
├── DeviceTooSmallError        weights or cache do not fit into the engine's part of its device
├── NoDeviceError              the device of the engine is missing
├── CacheTooSmallError         one sequence alone would not fit into the whole cache
├── SequenceFailedError        a step cannot go on with a sequence; other sequences go on
├── CacheLostError             the content of the cache is uncertain: the engine ends
└── RankLostError              a process of the group is gone: the engine ends

A message that contradicts the sequence it names (a base beyond its length, a token outside the vocabulary) is
a plain ValueError: the sender is wrong, the engine is well.
"""


class EngineError(Exception):
    """Anything the engine refuses by itself."""


class UnsupportedModelError(EngineError):
    """Refusal of a checkpoint whose architecture cannot run on the paged cache."""


class IncompleteCheckpointError(EngineError):
    """A checkpoint folder lacks a file, or part of one."""


class VocabularyMismatchError(EngineError):
    """Draft and target have different tokenizers."""


class DeviceTooSmallError(EngineError):
    """Refusal: weights or cache do not fit into the engine's part of a device."""


class NoDeviceError(EngineError):
    """Refusal: the process should take a GPU and sees none."""


class CacheTooSmallError(EngineError):
    """Refusal of a sequence that may outgrow the whole cache."""


class SequenceFailedError(EngineError):
    """The engine cannot go on with one sequence, and has closed it. Says nothing of its text."""


class CacheLostError(EngineError):
    """Error: a change of the cache was made in part."""


class RankLostError(EngineError):
    """Another rank of the group does not answer any more."""
