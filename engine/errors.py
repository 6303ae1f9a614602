"""What the engine refuses, by kind.

EngineError
├── UnsupportedModelError      the checkpoint cannot be served, with the reason
├── IncompleteCheckpointError  a file of it is missing or cut off
├── VocabularyMismatchError    draft and target do not read token ids alike
└── CacheTooSmallError         one sequence alone would not fit into the whole cache

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


class CacheTooSmallError(EngineError):
    """A sequence may grow beyond what the whole cache holds."""
