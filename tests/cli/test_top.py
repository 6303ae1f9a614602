"""Numbers of several gateways on one screen; each gateway knows only its own."""

import json
from concurrent import futures

import grpc
import pytest

from outrider.cli.command_line import main
from outrider.cli.top_command import figures, screen
from outrider.client.loads import FORGOTTEN_S, LoadHistory
from protos import generation_pb2, generation_pb2_grpc


def loads(gateway="a", uptime_s=1.0, tokens=0.0, **fields):
    task = generation_pb2.TaskTotals(
        task="json",
        drafter="model",
        tokens=tokens,
        target_passes=tokens / 4,
        accepted=tokens / 2,
        reached=tokens,
    )
    return generation_pb2.Loads(gateway=gateway, uptime_s=uptime_s, tasks=[task], **fields)


def test_rates_are_differences_over_a_gateway_s_own_time():
    history = LoadHistory()
    history.add(loads("a", 1.0, 100), 0.0)
    history.add(loads("b", 50.0, 1000), 0.0)
    assert history.rates() == {}
    history.add(loads("a", 3.0, 300), 2.0)
    history.add(loads("b", 51.0, 1010), 2.0)
    rates = history.rates()["json", "model"]
    assert rates.per_second["tokens"] == 200 / 2 + 10 / 1
    assert rates.ratio("accepted", "reached") == 0.5
    assert rates.ratio("drafted", "rounds") is None


def test_gateway_that_is_gone_is_forgotten():
    history = LoadHistory()
    history.add(loads("a", running=3), 0.0)
    history.add(loads("b", running=1), FORGOTTEN_S + 1.0)
    assert set(history.newest) == {"b"}


def test_depths_of_several_gateways_are_one_mean():
    history = LoadHistory()
    for gateway, sequences, depth in (("a", 1, 2.0), ("b", 3, 6.0)):
        in_force = generation_pb2.DepthInForce(reason="measured", sequences=sequences, mean_depth=depth)
        history.add(loads(gateway, depths=[in_force]), 0.0)
    assert history.depths() == {"measured": (4, 5.0)}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_worker_is_shown_as_its_last_listener_reports_it(order):
    told = [
        generation_pb2.WorkerLoad(address="10.0.0.1:5", reply_age_s=reply_age_s) for reply_age_s in (3.0, 0.5)
    ]
    told.append(generation_pb2.WorkerLoad(address="10.0.0.1:5"))  # gateway without a message from that worker
    history = LoadHistory()
    for number in order:
        history.add(loads(f"gateway {number}", workers=[told[number]]), 0.0)
    assert history.workers() == [told[1]]


def test_screen_shows_load_acceptance_depth_and_workers():
    history = LoadHistory()
    history.add(loads("a", 1.0, 0), 0.0)
    depths = [generation_pb2.DepthInForce(reason="measured", sequences=3, mean_depth=5.5)]
    worker = generation_pb2.WorkerLoad(
        role="target",
        address="10.0.0.1:5",
        running=3,
        free_blocks=60,
        total_blocks=100,
        reply_age_s=0.2,
        suspect=True,
    )
    fields = {"running": 3, "plain_tokens_per_second": 40.0, "depths": depths, "workers": [worker]}
    history.add(loads("a", 2.0, 90, **fields), 1.0)
    shown = screen(history)
    assert "1 gateway: 3 running, 0 waiting, 90 tokens/s, plain decoding would give 40" in shown
    history.add(loads("b", 1.0, 0), 1.0)  # a gateway whose target is new
    assert "plain decoding would give -" in screen(history)
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line}
    assert rows["json"] == ["json", "model", "90", "0.50", "4.00", "0.0", "0.0", "0.0"]
    assert rows["measured"] == ["measured", "3", "5.5"]
    assert rows["target"][1:] == ["(suspect)", "10.0.0.1:5", "3", "0", "40", "of", "100", "-", "0"]


class Gateway(generation_pb2_grpc.GenerationServicer):
    looks = 0

    def GetLoads(self, request, context):  # noqa: N802
        self.looks += 1
        return loads("a", float(self.looks), 10.0 * self.looks)


@pytest.fixture
def address():
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServicer_to_server(Gateway(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_command_looks_as_often_as_it_is_told(address, capsys):
    assert main(["top", "--address", address, "--every", "0.001", "--looks", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("1 gateway:") == 3
    assert out.rstrip().count("10 tokens/s") == 2


def test_command_prints_each_look_as_json(address, capsys):
    assert main(["top", "--address", address, "--every", "0.001", "--looks", "1", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [gateway["gateway"] for gateway in told["gateways"]] == ["a"]
    assert told["rates"] == []


def test_figures_have_rates_by_task_and_drafter():
    history = LoadHistory()
    history.add(loads("a", 1.0, 0), 0.0)
    history.add(loads("a", 2.0, 90), 1.0)
    (rates,) = figures(history)["rates"]
    assert (rates["task"], rates["drafter"], rates["tokens"]) == ("json", "model", 90.0)


def test_command_says_what_is_wrong(capsys):
    assert main(["top", "--address", "127.0.0.1:1"]) == 1
    assert "make serve" in capsys.readouterr().err
