from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_ACCEPTED: _ClassVar[Origin]
    ORIGIN_TARGET: _ClassVar[Origin]
    ORIGIN_PLAIN: _ClassVar[Origin]
    ORIGIN_FORCED: _ClassVar[Origin]
ORIGIN_UNSPECIFIED: Origin
ORIGIN_ACCEPTED: Origin
ORIGIN_TARGET: Origin
ORIGIN_PLAIN: Origin
ORIGIN_FORCED: Origin

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "max_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids", "bad_token_ids", "seed", "logprobs", "logprobs_of", "verification", "grammar", "noise_scope")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_OF_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NOISE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    logprobs: int
    logprobs_of: str
    verification: str
    grammar: str
    noise_scope: str
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., logprobs_of: _Optional[str] = ..., verification: _Optional[str] = ..., grammar: _Optional[str] = ..., noise_scope: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TextMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[TextMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[TextMessage, _Mapping]]] = ...) -> None: ...

class TextMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "tokens", "chat", "sampling", "stop", "speculation", "n", "task", "priority", "model", "include_rounds", "structured_outputs", "predicted_text", "predicted_tokens", "draft_from", "receipt")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TEXT_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FROM_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: TokenIds
    chat: TextMessages
    sampling: Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    speculation: SpeculationSettings
    n: int
    task: str
    priority: str
    model: str
    include_rounds: bool
    structured_outputs: StructuredOutputs
    predicted_text: str
    predicted_tokens: TokenIds
    draft_from: str
    receipt: bool
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[TextMessages, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., speculation: _Optional[_Union[SpeculationSettings, _Mapping]] = ..., n: _Optional[int] = ..., task: _Optional[str] = ..., priority: _Optional[str] = ..., model: _Optional[str] = ..., include_rounds: _Optional[bool] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., predicted_text: _Optional[str] = ..., predicted_tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., draft_from: _Optional[str] = ..., receipt: _Optional[bool] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json_object", "json", "regex", "choice", "grammar")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json: str
    regex: str
    choice: Texts
    grammar: str
    def __init__(self, json_object: _Optional[bool] = ..., json: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Texts, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Texts(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class SpeculationSettings(_message.Message):
    __slots__ = ("mode", "depth", "drafter", "verification", "report")
    MODE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    mode: str
    depth: int
    drafter: str
    verification: str
    report: bool
    def __init__(self, mode: _Optional[str] = ..., depth: _Optional[int] = ..., drafter: _Optional[str] = ..., verification: _Optional[str] = ..., report: _Optional[bool] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "token_ids", "logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("choice", "token_ids", "origins", "logprobs", "text", "finish_reason", "usage", "text_lengths", "seed", "round", "receipt")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TEXT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[Origin]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    text: str
    finish_reason: str
    usage: Usage
    text_lengths: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    round: Round
    receipt: str
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[Origin, str]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., text_lengths: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., receipt: _Optional[str] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("drafted", "parents", "accepted", "reason", "ahead_hit", "continued", "draft_ms", "target_ms", "queue_ms", "step_ms", "drafter", "because")
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AHEAD_HIT_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    drafted: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    ahead_hit: bool
    continued: bool
    draft_ms: float
    target_ms: float
    queue_ms: float
    step_ms: float
    drafter: str
    because: str
    def __init__(self, drafted: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., ahead_hit: _Optional[bool] = ..., continued: _Optional[bool] = ..., draft_ms: _Optional[float] = ..., target_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., step_ms: _Optional[float] = ..., drafter: _Optional[str] = ..., because: _Optional[str] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("choices", "usage")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    usage: Usage
    def __init__(self, choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("index", "token_ids", "origins", "logprobs", "text", "finish_reason", "receipt")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[Origin]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    text: str
    finish_reason: str
    receipt: str
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[Origin, str]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., receipt: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "speculation", "accepted_prediction_tokens", "rejected_prediction_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationCounts
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationCounts, _Mapping]] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SpeculationCounts(_message.Message):
    __slots__ = ("mode", "drafter", "rounds", "drafted", "reached", "accepted", "accepted_lengths", "mean_accepted_length", "target_passes", "late_drafts", "lost_drafts", "lost_targets", "seed", "prepared_for", "ahead_hit_ranks", "continued", "saved_ms", "wasted", "forced", "empty_drafts", "drafted_by", "routed", "judged", "host_drafts", "hedges", "moves")
    class DraftedByEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: DraftedBy
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[DraftedBy, _Mapping]] = ...) -> None: ...
    class RoutedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Routed
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Routed, _Mapping]] = ...) -> None: ...
    class JudgedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Judged
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Judged, _Mapping]] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TARGET_PASSES_FIELD_NUMBER: _ClassVar[int]
    LATE_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LOST_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LOST_TARGETS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FOR_FIELD_NUMBER: _ClassVar[int]
    AHEAD_HIT_RANKS_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    SAVED_MS_FIELD_NUMBER: _ClassVar[int]
    WASTED_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    EMPTY_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    HOST_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    HEDGES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    mode: str
    drafter: str
    rounds: int
    drafted: int
    reached: int
    accepted: int
    accepted_lengths: _containers.RepeatedScalarFieldContainer[int]
    mean_accepted_length: float
    target_passes: int
    late_drafts: int
    lost_drafts: int
    lost_targets: int
    seed: int
    prepared_for: int
    ahead_hit_ranks: _containers.RepeatedScalarFieldContainer[int]
    continued: int
    saved_ms: float
    wasted: int
    forced: int
    empty_drafts: int
    drafted_by: _containers.MessageMap[str, DraftedBy]
    routed: _containers.MessageMap[str, Routed]
    judged: _containers.MessageMap[str, Judged]
    host_drafts: int
    hedges: int
    moves: int
    def __init__(self, mode: _Optional[str] = ..., drafter: _Optional[str] = ..., rounds: _Optional[int] = ..., drafted: _Optional[int] = ..., reached: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_lengths: _Optional[_Iterable[int]] = ..., mean_accepted_length: _Optional[float] = ..., target_passes: _Optional[int] = ..., late_drafts: _Optional[int] = ..., lost_drafts: _Optional[int] = ..., lost_targets: _Optional[int] = ..., seed: _Optional[int] = ..., prepared_for: _Optional[int] = ..., ahead_hit_ranks: _Optional[_Iterable[int]] = ..., continued: _Optional[int] = ..., saved_ms: _Optional[float] = ..., wasted: _Optional[int] = ..., forced: _Optional[int] = ..., empty_drafts: _Optional[int] = ..., drafted_by: _Optional[_Mapping[str, DraftedBy]] = ..., routed: _Optional[_Mapping[str, Routed]] = ..., judged: _Optional[_Mapping[str, Judged]] = ..., host_drafts: _Optional[int] = ..., hedges: _Optional[int] = ..., moves: _Optional[int] = ...) -> None: ...

class Routed(_message.Message):
    __slots__ = ("times",)
    class TimesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIMES_FIELD_NUMBER: _ClassVar[int]
    times: _containers.ScalarMap[str, int]
    def __init__(self, times: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Judged(_message.Message):
    __slots__ = ("reached", "correct")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    reached: int
    correct: int
    def __init__(self, reached: _Optional[int] = ..., correct: _Optional[int] = ...) -> None: ...

class DraftedBy(_message.Message):
    __slots__ = ("rounds", "drafted", "reached", "accepted")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    drafted: int
    reached: int
    accepted: int
    def __init__(self, rounds: _Optional[int] = ..., drafted: _Optional[int] = ..., reached: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids", "pieces")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Loads(_message.Message):
    __slots__ = ("running", "waiting", "workers", "gateway", "uptime_s", "plain_tokens_per_second", "depths", "tasks", "rollouts")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    gateway: str
    uptime_s: float
    plain_tokens_per_second: float
    depths: _containers.RepeatedCompositeFieldContainer[DepthInForce]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskTotals]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., gateway: _Optional[str] = ..., uptime_s: _Optional[float] = ..., plain_tokens_per_second: _Optional[float] = ..., depths: _Optional[_Iterable[_Union[DepthInForce, _Mapping]]] = ..., tasks: _Optional[_Iterable[_Union[TaskTotals, _Mapping]]] = ..., rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("draft", "task", "verification", "share", "seen", "needed", "tokens_per_second", "others_tokens_per_second", "changes")
    class ChangesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    OTHERS_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    draft: str
    task: str
    verification: str
    share: float
    seen: float
    needed: float
    tokens_per_second: float
    others_tokens_per_second: float
    changes: _containers.ScalarMap[str, float]
    def __init__(self, draft: _Optional[str] = ..., task: _Optional[str] = ..., verification: _Optional[str] = ..., share: _Optional[float] = ..., seen: _Optional[float] = ..., needed: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., others_tokens_per_second: _Optional[float] = ..., changes: _Optional[_Mapping[str, float]] = ...) -> None: ...

class DepthInForce(_message.Message):
    __slots__ = ("reason", "sequences", "mean_depth")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MEAN_DEPTH_FIELD_NUMBER: _ClassVar[int]
    reason: str
    sequences: int
    mean_depth: float
    def __init__(self, reason: _Optional[str] = ..., sequences: _Optional[int] = ..., mean_depth: _Optional[float] = ...) -> None: ...

class TaskTotals(_message.Message):
    __slots__ = ("task", "drafter", "tokens", "target_passes", "rounds", "drafted", "reached", "accepted", "draft_s", "target_s", "fallbacks", "reopenings", "drafted_by", "routed", "judged", "moves")
    class DraftedByEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: DraftedBy
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[DraftedBy, _Mapping]] = ...) -> None: ...
    class RoutedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Routed
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Routed, _Mapping]] = ...) -> None: ...
    class JudgedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Judged
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Judged, _Mapping]] = ...) -> None: ...
    TASK_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PASSES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_S_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    REOPENINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    task: str
    drafter: str
    tokens: float
    target_passes: float
    rounds: float
    drafted: float
    reached: float
    accepted: float
    draft_s: float
    target_s: float
    fallbacks: float
    reopenings: float
    drafted_by: _containers.MessageMap[str, DraftedBy]
    routed: _containers.MessageMap[str, Routed]
    judged: _containers.MessageMap[str, Judged]
    moves: float
    def __init__(self, task: _Optional[str] = ..., drafter: _Optional[str] = ..., tokens: _Optional[float] = ..., target_passes: _Optional[float] = ..., rounds: _Optional[float] = ..., drafted: _Optional[float] = ..., reached: _Optional[float] = ..., accepted: _Optional[float] = ..., draft_s: _Optional[float] = ..., target_s: _Optional[float] = ..., fallbacks: _Optional[float] = ..., reopenings: _Optional[float] = ..., drafted_by: _Optional[_Mapping[str, DraftedBy]] = ..., routed: _Optional[_Mapping[str, Routed]] = ..., judged: _Optional[_Mapping[str, Judged]] = ..., moves: _Optional[float] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("role", "draft", "address", "streams", "running", "waiting", "free_blocks", "total_blocks", "reply_age_s", "suspect", "step_ms")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REPLY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    role: str
    draft: str
    address: str
    streams: int
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    reply_age_s: float
    suspect: bool
    step_ms: float
    def __init__(self, role: _Optional[str] = ..., draft: _Optional[str] = ..., address: _Optional[str] = ..., streams: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., reply_age_s: _Optional[float] = ..., suspect: _Optional[bool] = ..., step_ms: _Optional[float] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "vocab_size", "max_length", "workers", "adapters")
    ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    vocab_size: int
    max_length: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_length: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("role", "model", "address", "pid", "node")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    role: str
    model: str
    address: str
    pid: int
    node: str
    def __init__(self, role: _Optional[str] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...
