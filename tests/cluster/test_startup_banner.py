"""What `serve run` prints once the service is ready."""

import pytest

from cluster import startup_banner
from cluster.arguments import read_settings
from cluster.startup_banner import announcement

PROMISE = "same seed, same text: up to rounding, in bfloat16"
TARGET = {"role": "target", "draft": "", "promise": PROMISE, "is_exact": False}
DRAFT = {"role": "draft", "draft": "model", "promise": "of no interest"}
OPEN = "anybody is answered without an API key"


def test_announcement_says_where_to_whom_and_with_which_promise():
    health = {"workers": [TARGET, TARGET, DRAFT], "access": OPEN}
    told = announcement(read_settings({}), None, "10.0.0.1:8080", health)
    assert f"  access   {OPEN}\n" in told
    assert told.count(f"  promise  {PROMISE}\n") == 1
    assert "of no interest" not in told
    assert "without  draft" not in told
    assert "http://10.0.0.1:8080/metrics" in told


def test_announcement_of_the_demo_target_says_that_it_is_written_out():
    health = {"workers": [TARGET, DRAFT], "access": OPEN}
    told = announcement(read_settings({}), None, "h:1", health)
    assert (
        "  target   the small trained demo target (4 M parameters), written out at a realistic cost" in told
    )
    assert "written out" not in announcement(read_settings({"target": "demo-small"}), None, "h:1", health)


def test_announcement_of_a_service_whose_draft_has_not_come_names_the_draft():
    told = announcement(read_settings({}), "key", "h:1", {"workers": [TARGET], "access": OPEN})
    assert "  without  draft 'model', which has no worker yet\n" in told
    assert "Bearer <your API key>" in told


@pytest.mark.parametrize(("replicas", "exact", "told"), [(2, False, 1), (2, True, 0), (1, False, 0)])
def test_announcement_of_several_targets_that_round_differently_says_that_answers_stay(
    replicas: int, exact: bool, told: int
) -> None:
    health = {"workers": [{**TARGET, "is_exact": exact}], "access": OPEN}
    said = announcement(read_settings({"target.replicas": str(replicas)}), None, "h:1", health)
    assert said.count("  without  second targets: rounding differs among the targets") == told


def test_announce_waits_until_the_gateway_is_ready(monkeypatch, capsys):
    answers = iter([None, None, {"workers": [TARGET, DRAFT], "access": OPEN}])
    monkeypatch.setattr(startup_banner, "_health", lambda url, key: next(answers))
    monkeypatch.setattr(startup_banner, "POLL_S", 0.0)
    startup_banner._announce(read_settings({}), None, "h:1")
    assert "A first request:" in capsys.readouterr().out
