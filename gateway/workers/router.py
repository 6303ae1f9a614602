"""Router of a Serve handle, to which Serve pushes every change of the workers: so a gateway learns of it.

Serve pickles this module by value, so the table itself is in gateway/workers/registry.py, which every reader
imports.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from gateway.workers.registry import put


class TableRouter(RequestRouter):  # type: ignore[misc]
    """Records the workers. They take no requests through Serve, so it never routes a request."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        put(self._deployment_id.name, [replica.replica_metadata for replica in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]
