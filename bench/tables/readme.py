"""The README's table: the figures that decide whether this is for you."""

from collections.abc import Iterator

from bench.tables.reading import Row, found, number, results, written
from bench.tables.results import changed, numerics

GENERATE_AIMS = (1.25, 1.5, 1.4)  # ratios to transformers' generate, at 1, 8 and 32 streams
OPENVINO_AIMS = {"plain": 0.8, "drafts": 1.0}  # ratios of the service's speed at one stream
SERVICE, ENGINE = "Outrider, service", "Outrider, one process"
TRANSFORMERS, OPENVINO, VLLM = "transformers", "OpenVINO GenAI", "vLLM"


def summary() -> str:
    return written([*_speed(), *_beside_peers(), *_texts()])


def _row(what: str, measured: str, aim: str, benchmark: str) -> Row:
    command = f"`python -m bench {benchmark}`"
    return {"what": what, "measured": measured, "our aim": aim, "command": command}


def _speed() -> Iterator[Row]:
    ratios, rows = results("load")["ratios"], results("load")["rows"]
    means = {row["depth"]: row["ratio"] for row in results("engine")["means"] if row["batch"] == 1}
    depth = max(means, key=lambda depth: means[depth])
    yield _row(f"one process, one stream, K = {depth}, to plain decoding", _times(means[depth]), "", "engine")
    for compared in (ratios[0], ratios[-1]):
        streams = compared["streams"]
        point = {"streams": streams, "target": compared["target"]}
        pace, plain = (found(rows, mode=mode, **point)["tokens/s"] for mode in ("adaptive", "plain"))
        what = f"the service at {streams} stream{'s' if streams > 1 else ''}, to plain decoding"
        yield _row(what, _times(pace / plain), "", "load")
    paces = [row["adaptive / reference"] for row in ratios]
    missed = " and ".join(str(row["streams"]) for row in ratios if not row["ok"])
    between = f"{ratios[0]['streams']} to {ratios[-1]['streams']}"
    what = f"the same at {between}, to the best of plain and fixed depths"
    aim = number(ratios[0]["bar"]) + (f", missed at {missed} streams" if missed else "")
    yield _row(what, _times(min(paces), max(paces)), aim, "load")


def _beside_peers() -> Iterator[Row]:
    """Yields rows beside other programs: rows that lose and rows that win."""
    for mode, aim in OPENVINO_AIMS.items():
        for name in (SERVICE, ENGINE):
            ratios = _to_peer(name, OPENVINO, "190M", mode, (1, 8))
            told = number(aim) + _missed(ratios[0] < aim) if name == SERVICE else ""
            what = f"{name}: 190M target, {mode}, 1 and 8 streams, to OpenVINO"
            yield _row(what, _times(*ratios, between=", "), told, "peers")
    for name in (SERVICE, ENGINE):
        ratios = _to_peer(name, VLLM, "demo", "plain", (1, 8, 32))
        what = f"{name}: demo pair, plain, 1, 8, 32 streams, to vLLM"
        yield _row(what, _times(*ratios, between=", "), "", "peers")
    ratios = _to_peer(ENGINE, TRANSFORMERS, "demo", "plain", (1, 8, 32))
    is_missed = any(ratio < aim for ratio, aim in zip(ratios, GENERATE_AIMS, strict=True))
    yield _row(
        f"{ENGINE}: demo pair, plain, 1, 8, 32 streams, to transformers' `generate`",
        _times(*ratios, between=", "),
        ", ".join(f"{aim:g}" for aim in GENERATE_AIMS) + _missed(is_missed),
        "peers",
    )
    for pair in ("demo", "190M"):
        ratio = _peer_row(SERVICE, pair, "drafts", 1)["to its plain"]
        what = f"{SERVICE}: {pair} target, two cores, 1 stream, always drafting, to plain decoding"
        yield _row(what, _times(ratio), "", "peers")
    of_peers = ", ".join(changed(_peer_row(name, "demo", "drafts", 1)) for name in (SERVICE, VLLM, OPENVINO))
    what = "seeded texts that change with Drafts: Outrider, vLLM, OpenVINO"
    yield _row(what, of_peers, "0", "peers")


def _to_peer(name: str, peer: str, pair: str, mode: str, streams: tuple[int, ...]) -> list[float]:
    """Returns the ratios of our tokens per second to a peer's in the same mode, by the number of streams."""
    rows = [(_peer_row(name, pair, mode, count), _peer_row(peer, pair, mode, count)) for count in streams]
    return [own["tokens/s"] / other["tokens/s"] for own, other in rows]


def _peer_row(peer: str, pair: str, mode: str, streams: int) -> Row:
    return found(results("peers")["rows"], peer=peer, pair=pair, mode=mode, streams=streams)


def _texts() -> Iterator[Row]:
    rows = results("identity")["rows"]
    worst: dict[str, int] = {}
    for row in rows:
        worst[numerics(row)] = max(worst.get(numerics(row), 0), row["differ"])
    for kind, differ in worst.items():
        what, aim = f"texts that differ from plain decoding, {kind}", "" if kind == "bfloat16" else "0"
        yield _row(what, f"{differ} of {rows[0]['requests']}", aim, "identity")


def _times(*ratios: float, between: str = " to ") -> str:
    return f"{between.join(map(number, ratios))} times"


def _missed(is_missed: bool) -> str:
    return ", missed" if is_missed else ""
