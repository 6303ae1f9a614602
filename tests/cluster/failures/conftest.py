"""One service on two machines for this folder."""

from collections.abc import Iterator

import pytest

from tests.support.machines import deployed, raylets
from tests.support.two_machines import TwoMachines, application

TOKEN = "of the workers in these tests"


@pytest.fixture(scope="package")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    with pytest.MonkeyPatch.context() as patch, raylets(num_cpus=4, resources={"target_side": 8}) as cluster:
        patch.setenv("OUTRIDER_TOKEN", TOKEN)  # workers and gateways of later deployments share it
        draft_node = cluster.add_node(num_cpus=1, resources={"draft_side": 8})
        with deployed(tmp_path_factory.mktemp("machines"), cluster, application({})) as found:
            machines = TwoMachines(found.http, found.grpc, cluster, draft_node)
            machines.wait_for("target", 2)
            machines.wait_for("draft", 1)
            yield machines
