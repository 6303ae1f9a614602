"""Errors of the engine, by kind.

EngineError
├── UnsupportedModelError      the checkpoint cannot be served, with the reason
├── IncompleteCheckpointError  a file of the checkpoint is missing or truncated
├── VocabularyMismatchError    draft and target have different vocabularies
├── DeviceTooSmallError        weights or cache do not fit into the engine's share of its device
├── NoDeviceError              the process was assigned a GPU and sees none
├── CacheTooSmallError         the whole cache is too small for one sequence, or for one block
├── SequenceFailedError        one sequence cannot continue; other sequences continue
├── CacheLostError             the content of the cache is unknown: the engine stops
└── RankLostError              a process of the group is gone: the engine stops

A message may contradict the sequence it names: a base beyond its length, a token outside the vocabulary. It
raises a plain ValueError, as the fault is the sender's and the engine keeps working.
"""


class EngineError(Exception):
    """Base class of the engine's own errors."""


class UnsupportedModelError(EngineError):
    """Error: the checkpoint cannot be served; the message gives the reason."""


class IncompleteCheckpointError(EngineError):
    """Error: a file of a checkpoint folder is missing or truncated."""


class VocabularyMismatchError(EngineError):
    """Error: draft and target have different vocabularies."""


class DeviceTooSmallError(EngineError):
    """Error: weights or cache do not fit into the engine's share of a device."""


class NoDeviceError(EngineError):
    """Error: the process was assigned a GPU and sees none."""


class CacheTooSmallError(EngineError):
    """Error: the whole cache is too small for one sequence, or its budget for one block."""


class SequenceFailedError(EngineError):
    """Error: one sequence could not continue and was closed. The message reveals nothing of its text."""


class CacheLostError(EngineError):
    """Error: a change of the cache failed halfway, so that its content is unknown."""


class RankLostError(EngineError):
    """Error: another rank of the group no longer responds."""
