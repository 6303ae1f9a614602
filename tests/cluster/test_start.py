"""Resources that replicas need are there, come in time, or are named, as is a port that is taken."""

import socket

import pytest
import ray

from cluster.arguments import read_settings
from cluster.start import check_resources, start_ray

ALL = {"GPU": 3.0, "gateway": 2.0, "target": 3.0}


def settings(nodes_join_within_s=0.0):
    needed = {
        "gateway.replicas": 2,
        "gateway.resources": {"gateway": 1},
        "target": "t",
        "target.replicas": 3,
        "target.gpus": 1.0,
        "target.resources": {"target": 1},
        "ray.nodes_join_within_s": nodes_join_within_s,
    }
    return read_settings(needed)


@pytest.mark.parametrize("name", ALL)
def test_a_resource_that_is_short_is_named(monkeypatch, name):
    monkeypatch.setattr(ray, "cluster_resources", lambda: ALL | {name: 0.5})
    with pytest.raises(ValueError, match=f"{name}.*the cluster has 0.5"):
        check_resources(settings())


def test_nodes_may_join_later(monkeypatch):
    joined = iter([{}, {"GPU": 3.0}, ALL])
    monkeypatch.setattr(ray, "cluster_resources", lambda: next(joined))
    monkeypatch.setattr("cluster.start.POLL_S", 0.0)
    check_resources(settings(nodes_join_within_s=60))
    assert next(joined, None) is None


def test_nodes_that_never_join_are_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr("cluster.start.POLL_S", 0.0)
    with pytest.raises(ValueError, match="the cluster has 0"):
        check_resources(settings(nodes_join_within_s=0.05))


def test_a_metrics_port_that_is_taken_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"ray.metrics_port={port} is taken"):
            start_ray(read_settings({"ray.metrics_port": port}))
