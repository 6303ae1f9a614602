"""Loads of this gateway and its workers, for GetLoads and the page."""

import asyncio
import time
from typing import Any

from google.protobuf.message import Message

from gateway.generation.generation import Generation
from gateway.generation.totals import StatsKey
from gateway.loop.stats import Stats
from gateway.workers.streams import Link
from outrider.telemetry.counters import COUNTERS
from protos import generation_pb2


def loads(generation: Generation) -> generation_pb2.Loads:
    totals = generation.totals
    return generation_pb2.Loads(
        running=generation.admission.running,
        waiting=generation.admission.waiting,
        workers=[_worker(link) for link in generation.fleet.links()],
        gateway=totals.gateway,
        uptime_s=time.monotonic() - totals.began,
        plain_tokens_per_second=generation.plain_rate(),
        depths=[
            generation_pb2.DepthInForce(reason=reason, sequences=depth.sequences, mean_depth=depth.mean_depth)
            for reason, depth in totals.in_force().items()
        ],
        tasks=[_task(kind, stats) for kind, stats in totals.stats().items()],
        rollouts=[
            generation_pb2.Rollout(
                draft=draft,
                task=totals.label(kind.task),
                verification=kind.rule,
                share=rollout.share,
                seen=rollout.seen,
                needed=rollout.needed,
                tokens_per_second=rollout.rate or None,
                others_tokens_per_second=rollout.rate_of_others or None,
                changes={f"{share:g}": times for share, times in rollout.changes.items()},
            )
            for kind, draft, rollout in generation.rollouts
        ],
    )


def _worker(link: Link) -> generation_pb2.WorkerLoad:
    now = asyncio.get_running_loop().time()
    message = generation_pb2.WorkerLoad(
        role=link.worker.role,
        draft=link.worker.draft,
        address=link.worker.address,
        streams=link.streams,
        suspect=link.suspect_until > now,
    )
    if link.load is not None:
        message.running, message.waiting = link.load.running, link.load.waiting
        message.free_blocks, message.total_blocks = link.load.free_blocks, link.load.total_blocks
        message.reply_age_s = now - link.replied_at
        if link.step_ns:
            message.step_ms = link.step_ns / 1e6
    return message


def _task(kind: StatsKey, stats: Stats) -> generation_pb2.TaskTotals:
    return generation_pb2.TaskTotals(
        task=kind.task,
        drafter=kind.drafter,
        reopenings=stats.lost_targets,
        **counters(stats, generation_pb2.TaskTotals),
    )


def counters(stats: Stats, message: type[Message]) -> dict[str, Any]:
    """Returns the counters for which a message has a field, by name."""
    names = [counter.name for counter in COUNTERS if counter.name in message.DESCRIPTOR.fields_by_name]
    routed = {drafter: {"times": times} for drafter, times in stats.routed.items()}
    return {name: getattr(stats, name) for name in names} | {"routed": routed}
