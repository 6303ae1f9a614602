from protos import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Adapter(_message.Message):
    __slots__ = ("name", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class AdapterDropped(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftWorkerRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[DraftWorkerRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[DraftWorkerRequest, _Mapping]]] = ...) -> None: ...

class TargetWorkerRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[TargetWorkerRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[TargetWorkerRequest, _Mapping]]] = ...) -> None: ...

class DraftReplies(_message.Message):
    __slots__ = ("opened", "replies", "ended")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    opened: _containers.RepeatedCompositeFieldContainer[Opened]
    replies: _containers.RepeatedCompositeFieldContainer[DraftReply]
    ended: _containers.RepeatedCompositeFieldContainer[SequenceEnded]
    def __init__(self, opened: _Optional[_Iterable[_Union[Opened, _Mapping]]] = ..., replies: _Optional[_Iterable[_Union[DraftReply, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[SequenceEnded, _Mapping]]] = ...) -> None: ...

class TargetReplies(_message.Message):
    __slots__ = ("opened", "replies", "ended", "leaving")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    opened: _containers.RepeatedCompositeFieldContainer[Opened]
    replies: _containers.RepeatedCompositeFieldContainer[TargetReply]
    ended: _containers.RepeatedCompositeFieldContainer[SequenceEnded]
    leaving: _containers.RepeatedCompositeFieldContainer[Leaving]
    def __init__(self, opened: _Optional[_Iterable[_Union[Opened, _Mapping]]] = ..., replies: _Optional[_Iterable[_Union[TargetReply, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[SequenceEnded, _Mapping]]] = ..., leaving: _Optional[_Iterable[_Union[Leaving, _Mapping]]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Opened(_message.Message):
    __slots__ = ("sequence", "epoch")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class SequenceEnded(_message.Message):
    __slots__ = ("sequence", "epoch", "cause", "details")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[SequenceEnded.Cause]
        INVALID: _ClassVar[SequenceEnded.Cause]
        TOO_LARGE: _ClassVar[SequenceEnded.Cause]
        FAILED: _ClassVar[SequenceEnded.Cause]
        LEAVING: _ClassVar[SequenceEnded.Cause]
        GRAMMAR: _ClassVar[SequenceEnded.Cause]
        ADAPTER: _ClassVar[SequenceEnded.Cause]
    CAUSE_UNSPECIFIED: SequenceEnded.Cause
    INVALID: SequenceEnded.Cause
    TOO_LARGE: SequenceEnded.Cause
    FAILED: SequenceEnded.Cause
    LEAVING: SequenceEnded.Cause
    GRAMMAR: SequenceEnded.Cause
    ADAPTER: SequenceEnded.Cause
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    cause: SequenceEnded.Cause
    details: str
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., cause: _Optional[_Union[SequenceEnded.Cause, str]] = ..., details: _Optional[str] = ...) -> None: ...

class DraftWorkerRequest(_message.Message):
    __slots__ = ("sequence", "epoch", "open", "propose", "close")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    open: Open
    propose: Propose
    close: Close
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class TargetWorkerRequest(_message.Message):
    __slots__ = ("sequence", "epoch", "open", "decode", "score", "close", "audit")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    open: Open
    decode: Decode
    score: Score
    close: Close
    audit: Audit
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., decode: _Optional[_Union[Decode, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., audit: _Optional[_Union[Audit, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("prompt_length", "noise_key", "sampling", "adapter", "queued_ms", "predicted", "past")
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NOISE_KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    prompt_length: int
    noise_key: int
    sampling: _generation_pb2.Sampling
    adapter: Adapter
    queued_ms: int
    predicted: _containers.RepeatedScalarFieldContainer[int]
    past: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenIds]
    def __init__(self, prompt_length: _Optional[int] = ..., noise_key: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., queued_ms: _Optional[int] = ..., predicted: _Optional[_Iterable[int]] = ..., past: _Optional[_Iterable[_Union[_generation_pb2.TokenIds, _Mapping]]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Turn(_message.Message):
    __slots__ = ("round", "base", "tokens", "traceparent")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    def __init__(self, round: _Optional[int] = ..., base: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("turn", "depth", "alternatives")
    TURN_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    depth: int
    alternatives: int
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ..., depth: _Optional[int] = ..., alternatives: _Optional[int] = ...) -> None: ...

class Decode(_message.Message):
    __slots__ = ("turn", "draft", "lease")
    TURN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    draft: Draft
    lease: Lease
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("until", "depth", "alternatives", "drafter", "least_survival")
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    LEAST_SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    until: int
    depth: int
    alternatives: int
    drafter: str
    least_survival: float
    def __init__(self, until: _Optional[int] = ..., depth: _Optional[int] = ..., alternatives: _Optional[int] = ..., drafter: _Optional[str] = ..., least_survival: _Optional[float] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("turn", "start")
    TURN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    start: int
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ..., start: _Optional[int] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("turn",)
    TURN_FIELD_NUMBER: _ClassVar[int]
    turn: Turn
    def __init__(self, turn: _Optional[_Union[Turn, _Mapping]] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("tokens", "parents", "draft_probs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedCompositeFieldContainer[SparseProbs]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[_Union[SparseProbs, _Mapping]]] = ...) -> None: ...

class SparseProbs(_message.Message):
    __slots__ = ("token_ids", "probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("sequence", "epoch", "round", "proposed", "prepared", "timings", "load")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    round: int
    proposed: Proposed
    prepared: PreparedTree
    timings: Timings
    load: Load
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., proposed: _Optional[_Union[Proposed, _Mapping]] = ..., prepared: _Optional[_Union[PreparedTree, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Proposed(_message.Message):
    __slots__ = ("draft", "ahead")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    draft: Draft
    ahead: AheadOutcome
    def __init__(self, draft: _Optional[_Union[Draft, _Mapping]] = ..., ahead: _Optional[_Union[AheadOutcome, _Mapping]] = ...) -> None: ...

class PreparedTree(_message.Message):
    __slots__ = ("draft",)
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    draft: Draft
    def __init__(self, draft: _Optional[_Union[Draft, _Mapping]] = ...) -> None: ...

class AheadOutcome(_message.Message):
    __slots__ = ("tokens", "rank", "saved_ns", "wasted_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SAVED_NS_FIELD_NUMBER: _ClassVar[int]
    WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    rank: int
    saved_ns: int
    wasted_tokens: int
    def __init__(self, tokens: _Optional[int] = ..., rank: _Optional[int] = ..., saved_ns: _Optional[int] = ..., wasted_tokens: _Optional[int] = ...) -> None: ...

class TargetReply(_message.Message):
    __slots__ = ("sequence", "epoch", "round", "accepted", "tokens", "logprobs", "finish_reason", "draft", "timings", "load", "forced", "forced_nodes", "draft_step", "rank", "continues", "drafter", "margins", "is_draft_of_host")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    FORCED_NODES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAFT_OF_HOST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    round: int
    accepted: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    finish_reason: str
    draft: Draft
    timings: Timings
    load: Load
    forced: int
    forced_nodes: _containers.RepeatedScalarFieldContainer[int]
    draft_step: Step
    rank: int
    continues: bool
    drafter: str
    margins: _containers.RepeatedScalarFieldContainer[float]
    is_draft_of_host: bool
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., accepted: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., forced: _Optional[int] = ..., forced_nodes: _Optional[_Iterable[int]] = ..., draft_step: _Optional[_Union[Step, _Mapping]] = ..., rank: _Optional[int] = ..., continues: _Optional[bool] = ..., drafter: _Optional[str] = ..., margins: _Optional[_Iterable[float]] = ..., is_draft_of_host: _Optional[bool] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ns", "forward_ns", "step_ns", "total_ns", "last_step", "cached_tokens")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    forward_ns: int
    step_ns: int
    total_ns: int
    last_step: Step
    cached_tokens: int
    def __init__(self, queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., step_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., last_step: _Optional[_Union[Step, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("number", "ns", "sequences", "tokens", "prompt_tokens", "context_tokens", "experts_read", "is_early")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_READ_FIELD_NUMBER: _ClassVar[int]
    IS_EARLY_FIELD_NUMBER: _ClassVar[int]
    number: int
    ns: int
    sequences: int
    tokens: int
    prompt_tokens: int
    context_tokens: int
    experts_read: float
    is_early: bool
    def __init__(self, number: _Optional[int] = ..., ns: _Optional[int] = ..., sequences: _Optional[int] = ..., tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., experts_read: _Optional[float] = ..., is_early: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("decoding", "running", "waiting", "free_blocks", "total_blocks", "no_drafts_because")
    class NoDraftsBecauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DECODING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NO_DRAFTS_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    decoding: int
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    no_drafts_because: _containers.ScalarMap[str, str]
    def __init__(self, decoding: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., no_drafts_because: _Optional[_Mapping[str, str]] = ...) -> None: ...
