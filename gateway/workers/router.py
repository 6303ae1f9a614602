"""Serve pushes every change of the workers to the router of a handle: so a gateway learns of them.

Serve pickles this module by value, so the table itself lives in gateway/workers/registry.py, which every
reader imports.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from gateway.workers.registry import put


class TableRouter(RequestRouter):  # type: ignore[misc]
    """Records the workers. They take no requests through Serve, so nothing is ever routed."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        put(self._deployment_id.name, [replica.replica_metadata for replica in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]
