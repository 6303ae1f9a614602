"""Message about a round, for requests that ask for rounds: gRPC sends it, HTTP sends its JSON."""

from gateway.events import VerdictReceived
from protos import generation_pb2


def round_message(round_: VerdictReceived) -> generation_pb2.Round:
    timings = round_.reply.timings
    return generation_pb2.Round(
        drafted=round_.proposal.draft.tokens,
        parents=round_.proposal.draft.parents,
        accepted=round_.correct,
        reason=round_.reason,
        ahead_hit=round_.proposal.ahead_hit,
        continued=round_.continued,
        draft_ms=1e3 * round_.draft_s,
        target_ms=1e3 * round_.target_s,
        queue_ms=timings.queue_ns / 1e6,
        step_ms=timings.step_ns / 1e6,
        drafter=round_.proposal.drafter,
        because=round_.proposal.because,
    )
