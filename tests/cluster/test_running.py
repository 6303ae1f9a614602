"""Ports of services that a test starts."""

from tests.support.running import free_port


def test_free_port_asked_for_many_times_is_a_new_port_each_time() -> None:
    ports = [free_port() for _ in range(500)]
    assert len(set(ports)) == len(ports)
