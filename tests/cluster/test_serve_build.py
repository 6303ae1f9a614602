"""``serve build`` writes a config file of Serve, and starts nothing but Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray._common.utils import import_attr
from ray.serve import Application
from ray.serve.deployment import deployment_to_schema
from ray.serve.schema import ServeDeploySchema

from cluster.start import ADD_SERVICERS
from tests.support.applications import deployments, pretend_cluster
from tests.support.patience import START_S

PATH = "cluster.service"


def test_service_is_an_application_with_the_settings_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "outrider.yaml"
    file.write_text("target: {model: demo-small, max_replicas: 3}\ngateway: {replicas: 2, max_waiting: 5}\n")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(file))
    started = pretend_cluster(monkeypatch)
    application = import_attr(PATH)
    assert isinstance(application, Application)
    assert started == ["start_ray"]
    schemas = {name: deployment_to_schema(found) for name, found in deployments(application).items()}
    assert schemas.keys() == {"gateway", "target", "draft-model"}
    assert schemas["gateway"].num_replicas == 2
    assert schemas["target"].autoscaling_config.max_replicas == 3


def test_service_without_a_file_is_the_demo_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CONFIG", raising=False)
    pretend_cluster(monkeypatch)
    assert deployments(import_attr(PATH))["gateway"].init_args[0].model == "outrider-demo"


@pytest.mark.slow
def test_serve_build_writes_a_file_that_serve_takes(tmp_path: Path) -> None:
    (tmp_path / "outrider.yaml").write_text("target: {model: demo-small, max_replicas: 2}\n")
    functions = [part for name in ADD_SERVICERS for part in ("--grpc-servicer-functions", name)]
    command = [sys.executable, "-m", "ray.serve.scripts", "build", PATH, "-o", "serve.yaml", *functions]
    environment = {**os.environ, "OUTRIDER_CONFIG": "outrider.yaml", "RAY_ADDRESS": "local"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=START_S)
    config = ServeDeploySchema.model_validate(yaml.safe_load((tmp_path / "serve.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == PATH
    assert config.grpc_options.grpc_servicer_functions == ADD_SERVICERS
    assert [deployment.name for deployment in application.deployments] == ["target", "draft-model", "gateway"]
