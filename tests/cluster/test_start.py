"""Resources that replicas need are there, come in time, or are named, as is a port that is taken."""

import logging
import socket
from contextlib import ExitStack

import pytest
import ray

from cluster.arguments import read_settings
from cluster.start import check_resources, start_ray, warn_of_skipped_audits

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
def test_resource_that_is_short_is_named(monkeypatch, name):
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


@pytest.fixture
def taken_port():
    """A port of this machine that another program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_metrics_port_that_is_taken_is_refused(taken_port) -> None:
    with pytest.raises(ValueError, match=f"ray.metrics_port={taken_port} is taken"):
        start_ray(read_settings({"ray.metrics_port": taken_port}))


PORTS = ["addresses.http_port", "addresses.grpc_port", "addresses.direct_grpc_port"]


@pytest.fixture
def free_ports(monkeypatch):
    """Ray runs, as far as the start can see, and the ports that a test does not take are free."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with ExitStack() as listeners:
        sockets = [listeners.enter_context(socket.socket()) for _ in PORTS]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        ports = [listener.getsockname()[1] for listener in sockets]
    return dict(zip(PORTS, ports, strict=True))


@pytest.mark.parametrize("name", PORTS)
def test_start_port_that_another_program_has_is_refused_by_setting_and_number(
    monkeypatch, free_ports, taken_port, name
):
    monkeypatch.setattr("cluster.start._serve_is_running", lambda: False)
    start_ray(read_settings(free_ports))
    with pytest.raises(ValueError, match=f"{name}={taken_port} is taken by another program"):
        start_ray(read_settings({**free_ports, name: taken_port}))


def test_start_ports_that_serve_itself_has_are_left_to_it(monkeypatch, free_ports, taken_port):
    monkeypatch.setattr("cluster.start._serve_is_running", lambda: True)
    start_ray(read_settings({**free_ports, "addresses.http_port": taken_port}))


@pytest.mark.parametrize(
    ("replicas", "fraction", "warns"), [(1, 0.1, True), (2, 0.1, False), (1, 0.0, False)]
)
def test_start_says_that_a_single_target_skips_every_audit(caplog, replicas, fraction, warns):
    given = {"target": "t", "target.replicas": replicas, "gateway.audit.fraction": fraction}
    with caplog.at_level(logging.WARNING, "ray.serve"):
        warn_of_skipped_audits(read_settings(given))
    assert ("gateway.audit.fraction=0.1 with one replica" in caplog.text) == warns
