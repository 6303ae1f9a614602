"""Compares other servers with Outrider on equal weights, prompts and threads: `python -m bench peers`.

The peers are transformers' generate and assisted generation, OpenVINO GenAI, vLLM's build for CPUs, our
engine in one process, and our service. They run one after the other, each with its models in processes of its
own. Other servers are first installed into environments of their own (some 5 GB). All compute in float32.
Each peer is started several times, in turn with the other peers, and the median over its starts counts.

The prompts are of every kind of text. Each stream answers a prompt greedily to a fixed length; the time until
the last answer is complete counts. Then prompts are answered with a seed each, by plain decoding and with
drafts, and the texts that differ are counted. Pairs and peers that a run leaves out keep their earlier
figures.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from bench.checkpoints import DEMO_PAIR, DRAFT, INFLATED, target_path
from bench.peers.answering import PeerTask
from bench.peers.environments import OPENVINO, VLLM, Environment, python_of
from bench.report import RESULTS, command, machine, parser_of, save, table
from outrider.demo.prompts import KINDS, prompts
from tests.support.running import end_with_this_process

NAME = "peers"
PLAIN, DRAFTED, PACE = "plain", "drafts", "pace"
SEEDED, TEMPERATURE = 12, 0.8
PROMPTS = 32


@dataclass(frozen=True)
class Peer:
    name: str
    module: str  # name within bench.peers
    environment: Environment | None  # None: our own environment
    modes: tuple[str, ...]


PEERS = {
    "transformers": Peer("transformers", "transformers_generate", None, (PLAIN, DRAFTED)),
    "openvino": Peer("OpenVINO GenAI", "openvino_genai", OPENVINO, (PLAIN, DRAFTED)),
    "vllm": Peer("vLLM", "vllm_cpu", VLLM, (PLAIN, DRAFTED)),
    "engine": Peer("Outrider, one process", "outrider_engine", None, (PLAIN, DRAFTED)),
    "service": Peer("Outrider, service", "outrider_service", None, (PLAIN, DRAFTED, PACE)),
}


def tokens_of_prompts(tokenizer: Path) -> list[list[int]]:
    """Returns the token ids of prompts; the kinds of text take turns."""
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    each = -(-PROMPTS // len(KINDS))
    return [
        encode(prompt).ids
        for by_turns in zip(*(prompts(kind, each) for kind in KINDS), strict=True)
        for prompt in by_turns
    ]


def task_of(options: argparse.Namespace, pair: str, mode: str, result: Path) -> PeerTask:
    target = target_path(pair)
    return PeerTask(
        target=str(target),
        draft=None if mode == PLAIN else str(DRAFT.absolute()),
        depth=None if mode == PACE else options.depth,
        threads=options.threads,
        streams=tuple(options.streams),
        prompts=tokens_of_prompts(target),
        tokens=options.tokens,
        temperature=TEMPERATURE,
        seeded=SEEDED,
        repetitions=options.repetitions,
        result=str(result),
    )


def answered(peer: Peer, task: PeerTask, folder: Path) -> dict[str, Any]:
    """Runs a peer and returns the result that it wrote.

    Raises:
        CalledProcessError: the peer failed.
    """
    stored = folder / "task.json"
    stored.write_text(json.dumps(asdict(task)))
    command = [python_of(peer.environment), "-m", f"bench.peers.{peer.module}", str(stored)]
    root = str(Path(__file__).parents[2])
    with (folder / "log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": root}
        ended = subprocess.run(
            command, stdout=log, stderr=log, env=environment, preexec_fn=end_with_this_process
        )
    if ended.returncode:
        print("\n".join((folder / "log").read_text().splitlines()[-20:]), flush=True)
        ended.check_returncode()
    result: dict[str, Any] = json.loads(Path(task.result).read_text())
    return result


def rows_of(options: argparse.Namespace, pair: str) -> Iterator[dict[str, Any]]:
    """Starts every peer in turn, several times, because the memory speed of a shared machine varies."""
    turns = [(name, mode) for name in options.peers for mode in PEERS[name].modes]
    results = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for start in range(options.starts):
        for name, mode in turns:
            print(f"{pair}: {PEERS[name].name}, {mode}, start {start + 1} of {options.starts}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                task = task_of(options, pair, mode, Path(folder) / "result.json")
                results[name, mode].append(answered(PEERS[name], task, Path(folder)))
    for name, mode in turns:
        plain, result = results[name, PLAIN], results[name, mode]
        pairs = list(zip(plain[0]["seeded"], result[0]["seeded"], strict=True))
        for place, streams in enumerate(options.streams):
            rows = [of_start["rows"][place] for of_start in result]
            rate = median(row["rate"] for row in rows)
            yield {
                "pair": pair,
                "peer": PEERS[name].name,
                "mode": mode,
                "streams": streams,
                "tokens/s": rate,
                "to its plain": rate / median(of_start["rows"][place]["rate"] for of_start in plain),
                "cores": median(row["cores"] for row in rows),
                "tokens / pass": rows[0]["tokens_per_pass"],
                "seeded texts that differ": sum(before != after for before, after in pairs),
                "seeded texts": len(pairs),
            }


def saved(rows: Sequence[dict[str, Any]], threads: int) -> Path:
    """Writes the rows, and keeps earlier rows of other pairs and peers on this machine."""
    path = RESULTS / f"{NAME}.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    if (stored.get("machine"), stored.get("threads")) != (machine(), threads):
        stored = {"rows": [], "commands": {}}
    anew = {_measured(row): command() for row in rows}
    kept = [row for row in stored["rows"] if _measured(row) not in anew]
    order = [_measured(row) for row in stored["rows"]] + [*anew]
    together = sorted([*kept, *rows], key=lambda row: order.index(_measured(row)))
    return save(NAME, together, threads=threads, commands=stored["commands"] | anew)


def _measured(row: dict[str, Any]) -> str:
    """Returns the key of the rows that a run replaces together."""
    return f"{row['pair']}: {row['peer']}"


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("peers", __doc__)
    parser.add_argument("--pairs", nargs="+", choices=[DEMO_PAIR, *INFLATED], default=[DEMO_PAIR, "190M"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2, help="threads of the model")
    parser.add_argument("--depth", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repetitions", type=int, default=2, help="answers of a start that are timed")
    parser.add_argument(
        "--starts", type=int, default=3, help="starts of each peer, of which the median counts"
    )
    options = parser.parse_args(arguments)
    rows = [row for pair in options.pairs for row in rows_of(options, pair)]
    print(table(rows))
    print(saved(rows, options.threads))
