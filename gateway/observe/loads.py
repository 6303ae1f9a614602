"""How busy this gateway and its workers are, as GetLoads and the page tell it."""

import asyncio
import time

from gateway.generation.generation import Generation
from gateway.observe.stats import Record
from gateway.observe.totals import Kind
from gateway.workers.streams import Link
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
        tasks=[_task(kind, record) for kind, record in totals.records().items()],
    )


def _worker(link: Link) -> generation_pb2.WorkerLoad:
    now = asyncio.get_running_loop().time()
    message = generation_pb2.WorkerLoad(
        role=link.worker.role,
        address=link.worker.address,
        streams=link.streams,
        suspect=link.suspect_until > now,
    )
    if link.load is not None:
        message.running, message.waiting = link.load.running, link.load.waiting
        message.free_blocks, message.total_blocks = link.load.free_blocks, link.load.total_blocks
        message.heard_s, message.step_ms = now - link.heard_at, link.step_ns / 1e6
    return message


def _task(kind: Kind, record: Record) -> generation_pb2.TaskTotals:
    return generation_pb2.TaskTotals(
        task=kind.task,
        drafter=kind.drafter,
        tokens=record.tokens,
        target_passes=record.target_passes,
        rounds=record.rounds,
        drafted=record.drafted,
        verified=record.verified,
        accepted=record.accepted,
        draft_s=record.draft_s,
        target_s=record.target_s,
        fallbacks=record.fallbacks,
        reopenings=record.lost_targets,
    )
