"""The README's table: the figures that decide whether this is for you."""

from bench.tables.in_process import is_batch_invariant
from bench.tables.reading import Row, found, number, results, table

PLAIN_AIMS = {1: 1.25, 8: 1.5, 32: 1.4}  # to transformers' generate, by batch
SERVICE, ENGINE, OPENVINO, VLLM = "Outrider, service", "Outrider, one process", "OpenVINO GenAI", "vLLM"
PEER_AIMS = {"plain": 0.8, "drafts": 1.0}  # ratio of the service's speed to OpenVINO's, at one stream


def summary() -> str:
    rows = [*_speed(), *_beside_peers(), *_texts(), *_costs()]
    header = ["what", "measured", "our aim", "command"]
    return table(header, ([*cells, f"`python -m bench {name}`"] for *cells, name in rows))


def _speed() -> list[list[str]]:
    load, ahead = results("load"), results("ahead")
    means = {row["depth"]: row["ratio"] for row in results("engine")["means"] if row["batch"] == 1}
    depth = max(means, key=lambda depth: means[depth])
    paces = [row["adaptive / reference"] for row in load["ratios"]]
    missed = [str(row["streams"]) for row in load["ratios"] if not row["ok"]]
    gains = [row["with / without"] for row in ahead["rows"]]
    few, many = load["ratios"][0], load["ratios"][-1]
    aim = number(few["bar"]) + (f", missed at {' and '.join(missed)} streams" if missed else "")
    return [
        [f"one process, one stream, K = {depth}, to plain decoding", _times(means[depth]), "", "engine"],
        [f"the service at {few['streams']} stream, to plain decoding", _times(_to_plain(few)), "", "load"],
        [f"the service at {many['streams']} streams, to plain decoding", _times(_to_plain(many)), "", "load"],
        [
            f"the same at {few['streams']} to {many['streams']}, to the best of plain and fixed depths",
            _times(min(paces), max(paces)),
            aim,
            "load",
        ],
        ["draft-ahead, one stream, to drafting without it", _times(min(gains), max(gains)), "", "ahead"],
    ]


def _beside_peers() -> list[list[str]]:
    """Returns rows beside other programs: rows that lose and rows that win."""
    rows = []
    for mode, aim in PEER_AIMS.items():
        for name in (SERVICE, ENGINE):
            ratios = _to_peer(name, OPENVINO, "190M", mode, (1, 8))
            told = number(aim) + _missed(ratios[0] < aim) if name == SERVICE else ""
            what = f"{name}: 190M target, {mode}, 1 and 8 streams, to OpenVINO"
            rows.append([what, _times(*ratios, between=", "), told, "peers"])
    for name in (SERVICE, ENGINE):
        ratios = _to_peer(name, VLLM, "demo", "plain", (1, 8, 32))
        what = f"{name}: demo pair, plain, 1, 8, 32 streams, to vLLM"
        rows.append([what, _times(*ratios, between=", "), "", "peers"])
    for pair in ("demo", "190M"):
        ratio = _peer_row(SERVICE, pair, "drafts", 1)["to its plain"]
        what = f"{SERVICE}: {pair} target, two cores, 1 stream, always drafting, to plain decoding"
        rows.append([what, _times(ratio), "", "peers"])
    changed = ", ".join(map(_changed, (SERVICE, VLLM, OPENVINO)))
    rows.append(["seeded texts that change with Drafts: Outrider, vLLM, OpenVINO", changed, "0", "peers"])
    return rows


def _to_peer(name: str, peer: str, pair: str, mode: str, streams: tuple[int, ...]) -> list[float]:
    """Ratios of our tokens per second to a peer's in the same mode, by the number of streams."""
    rows = [(_peer_row(name, pair, mode, count), _peer_row(peer, pair, mode, count)) for count in streams]
    return [ours["tokens/s"] / theirs["tokens/s"] for ours, theirs in rows]


def _changed(peer: str) -> str:
    row = _peer_row(peer, "demo", "drafts", 1)
    return f"{row['seeded texts that differ']} of {row['seeded texts']}"


def _peer_row(peer: str, pair: str, mode: str, streams: int) -> Row:
    return found(results("peers")["rows"], peer=peer, pair=pair, mode=mode, streams=streams)


def _texts() -> list[list[str]]:
    rows = results("identity")["rows"]
    kinds = {"float32": ("float32", False), "bfloat16": ("bfloat16", False)}
    kinds["bfloat16, batch-invariant"] = ("bfloat16", True)
    worst = {
        name: max(row["differ"] for row in rows if (row["dtype"], is_batch_invariant(row)) == kind)
        for name, kind in kinds.items()
    }
    asked = rows[0]["requests"]
    return [
        [
            f"texts that differ from plain decoding, {name}",
            f"{differ} of {asked}",
            "" if name == "bfloat16" else "0",
            "identity",
        ]
        for name, differ in worst.items()
    ]


def _costs() -> list[list[str]]:
    plain = results("plain")["rows"]
    is_missed = any(row["ratio"] < PLAIN_AIMS[row["batch"]] for row in plain)
    return [
        [
            f"plain decoding to transformers' `generate`, batch {', '.join(str(r['batch']) for r in plain)}",
            _times(*(row["ratio"] for row in plain), between=", "),
            ", ".join(f"{PLAIN_AIMS[row['batch']]:g}" for row in plain) + _missed(is_missed),
            "plain",
        ],
    ]


def _times(*ratios: float, between: str = " to ") -> str:
    return f"{between.join(map(number, ratios))} times"


def _missed(is_missed: bool) -> str:
    return ", missed" if is_missed else ""


def _to_plain(compared: Row) -> float:
    """The pace's tokens per second to those of plain decoding."""
    point = {"streams": compared["streams"], "target": compared["target"]}
    rows = results("load")["rows"]
    rates = [found(rows, mode=mode, **point)["tokens/s"] for mode in ("adaptive", "plain")]
    return float(rates[0] / rates[1])
