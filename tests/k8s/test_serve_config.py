"""serveConfigV2 is what Ray takes, its settings are ours, and the application is built from it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from pydantic import ValidationError
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import BuiltApplication, build_app
from ray.serve.schema import ServeDeploySchema

from cluster.preflight import Preflight
from cluster.preflight import find as find_models
from cluster.settings_errors import SettingsError
from cluster.start import ADD_SERVICERS
from outrider.pace.settings import PaceSettings
from tests.k8s.kustomize import Manifest, find
from tests.k8s.mutations import mutated
from tests.k8s.overlays import built
from tests.k8s.pods_view import lay_out

# As Ray names what it finds on the nodes that the overlays select.
ACCELERATORS = {"nvidia-h100-80gb": "H100", "nvidia-l4": "L4", "p5.48xlarge": "H100", "g6.2xlarge": "L4"}
SERVE = "RayService/outrider/spec/serveConfigV2"
SETTINGS = "ConfigMap/outrider-settings/data/outrider.yaml"


def nodes_of(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """Returns nodes as Ray lists them once the first pods of a RayService have joined."""
    nodes = []
    for group in find(manifests, "RayService", "outrider")["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        of_pod = {**group["resources"], "GPU": limits.get("nvidia.com/gpu", 0)}
        for selected in group["template"]["spec"].get("nodeSelector", {}).values():
            of_pod[f"accelerator_type:{ACCELERATORS[selected]}"] = 1
        resources = {name: float(amount) for name, amount in of_pod.items()}
        nodes += [{"Alive": True, "Resources": resources}] * group["replicas"]
    return nodes


@pytest.fixture
def deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Does with manifests what Serve does with a configuration, up to starting replicas."""
    for step in ("start_ray", "start_serve"):
        monkeypatch.setattr(f"cluster.application.{step}", lambda *_: None)
    # In this process, which has torch already.
    monkeypatch.setattr("cluster.start.ask_nodes", lambda settings: {})
    monkeypatch.setattr(Preflight, "find", lambda _, settings, **found: find_models(settings, **found))

    def deployed(manifests: list[Manifest]) -> tuple[ServeDeploySchema, BuiltApplication]:
        nodes = nodes_of(manifests)
        together = sum((Counter(node["Resources"]) for node in nodes), Counter())
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray, "cluster_resources", lambda: dict(together))
        text = lay_out(manifests, tmp_path)
        config = ServeDeploySchema.model_validate(yaml.safe_load(text))
        (application,) = config.applications
        builder = import_attr(application.import_path)
        at_once = {**application.args, "ray.nodes_join_within_s": 0.0}
        bound = call_user_app_builder_with_args_if_necessary(builder, at_once)
        return config, build_app(
            bound, name=application.name, make_deployment_handle=lambda deployment, app: deployment.name
        )

    return deployed


@pytest.mark.slow_beyond_first
def test_application_is_built_from_it(manifests: list[Manifest], deploy: Any) -> None:
    config, application = deploy(manifests)
    by_name = {deployment.name: deployment for deployment in application.deployments}
    assert by_name.keys() == {"gateway", "target", "draft-model"}
    assert {options.name for options in config.applications[0].deployments} <= by_name.keys()
    options = by_name["gateway"].ray_actor_options
    assert (options["num_cpus"], options["resources"]) == (0, {"gateway": 1})
    trust = by_name["target"].init_args[1]
    has_certificates = "mutual-tls.yaml" in find(manifests, "ConfigMap", "outrider-settings")["data"]
    assert (trust.certificate is not None) == has_certificates
    assert by_name["gateway"].init_args[0].api_key_digests


def test_ray_knows_every_field_of_it(manifests: list[Manifest]) -> None:
    """Ray's schema drops what it does not know, without a word."""
    assert dropped(manifests) == []


def dropped(manifests: list[Manifest]) -> list[str]:
    given = yaml.safe_load(find(manifests, "RayService", "outrider")["spec"]["serveConfigV2"])
    return _missing(given, ServeDeploySchema.model_validate(given).model_dump(exclude_unset=True))


def _missing(given: Any, kept: Any, path: str = "") -> list[str]:
    if isinstance(given, dict):
        gone = [f"{path}.{key}" for key in given if key not in kept]
        return gone + [
            name
            for key in given.keys() & kept.keys()
            for name in _missing(given[key], kept[key], f"{path}.{key}")
        ]
    if isinstance(given, list):
        return [name for left, right in zip(given, kept, strict=True) for name in _missing(left, right, path)]
    return []


def test_proxy_opens_with_our_services(manifests: list[Manifest]) -> None:
    config = yaml.safe_load(find(manifests, "RayService", "outrider")["spec"]["serveConfigV2"])
    assert config["grpc_options"]["grpc_servicer_functions"] == ADD_SERVICERS
    assert all(callable(import_attr(path)) for path in ADD_SERVICERS)


def test_pace_takes_its_user_config(manifests: list[Manifest]) -> None:
    config = yaml.safe_load(find(manifests, "RayService", "outrider")["spec"]["serveConfigV2"])
    (gateway,) = (d for d in config["applications"][0]["deployments"] if d["name"] == "gateway")
    PaceSettings.model_validate(gateway["user_config"])
    with pytest.raises(ValidationError, match="of_below"):
        PaceSettings.model_validate({**gateway["user_config"], "of_below": 0.5})


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("place", "old", "new", "error", "told"),
    [
        (SERVE, "EveryNode", "EveryPod", ValidationError, "proxy_location"),
        (SERVE, "import_path: cluster.app", "import_path: cluster.application.apps", AttributeError, "apps"),
        (SERVE, "      config: ", "      confg: ", SettingsError, "config is one"),
        (SERVE, "outrider/settings", "outrider/setting", ValueError, "setting"),
        (SETTINGS, "tensor_parallel: 4", "tensor_paralel: 4", SettingsError, "target.tensor_parallel is one"),
        (SETTINGS, "resources: {draft: 1}", "resources: {drafts: 1}", ValueError, "'drafts'"),
        (SETTINGS, "gpus: 1 # per", "gpus: 9 # per", SettingsError, "give each rank 1"),
        (SETTINGS, "gpus: 1\n", "gpus: 9\n", SettingsError, "a draft uses one GPU"),
        (SETTINGS, "replicas: 1\n    max_replicas: 4", "replicas: 9", ValueError, "'GPU'"),
        (SETTINGS, "accelerator: L4", "accelerator: T4", ValueError, "accelerator_type:T4"),
        (SETTINGS, "cache_memory: 0.2", "cache_memory: 0.99", ValueError, "cache_memory"),
        (SETTINGS, "outrider/keys", "outrider/key", ValueError, "api_keys_file"),
    ],
)
def test_serve_config_with_a_slip_is_refused(
    place: str, old: str, new: str, error: type[Exception], told: str, deploy: Any
) -> None:
    kind, name, *path = place.split("/")
    text: Any = find(built("gke"), kind, name)
    for key in path:
        text = text[key]
    assert old in text
    with pytest.raises(error, match=told):
        deploy(mutated(built("gke"), place, text.replace(old, new)))


def test_field_that_ray_does_not_know_is_told() -> None:
    text = find(built("gke"), "RayService", "outrider")["spec"]["serveConfigV2"]
    slip = mutated(built("gke"), SERVE, text.replace("  request_timeout_s", "  request_timeout"))
    assert sorted(dropped(slip)) == [".grpc_options.request_timeout", ".http_options.request_timeout"]
