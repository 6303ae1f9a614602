"""JSON by schema: what grammars cost, and what they and Drafts bring together: `python -m bench structured`.

Held-out chats, in which the demo pair is to put a sentence into JSON of a schema, on the demo target inflated
to a realistic cost: plain, with Drafts, under the schema's grammar, and both. And the cost of masks by size
of the vocabulary, along such answers: the large one is Mistral's where mistral-common is installed.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import torch
from tokenizers import Tokenizer
from transformers.integrations.mistral import MistralConverter

from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.report import save, table
from gateway.generation.form import Form
from outrider.decoding.draft import Draft
from outrider.decoding.grammar import Matcher, compiled, token_table
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.draft_model import DraftModel
from outrider.engine.offline.speculate import Request, generate
from outrider.engine.settings import EngineSettings
from workshop.demo.schema_answers import schema_answer_document

SEED = 1_000_003  # of chats that no training has seen
CACHE_BYTES = 2**28
DEPTH = 6
LARGE = 2**17  # tokens
TEKKEN = "data/tekken_240911.json"  # of mistral-common: Mistral's vocabulary of LARGE tokens
WAYS = {  # grammar, depth
    "plain": (False, 0),
    "Drafts": (False, DEPTH),
    "grammar": (True, 0),
    "grammar and Drafts": (True, DEPTH),
}


def tasks(count: int) -> list[tuple[str, dict[str, Any], str]]:
    """Chats that ask for JSON of a schema: prompt, schema, and the right answer."""
    random, made = Random(SEED), list[tuple[str, dict[str, Any], str]]()
    while len(made) < count:
        prompt, answer = schema_answer_document(random)
        asked = re.search(r"of this schema: (\{.*?\})<\|", prompt, re.S)
        if asked is not None:
            made.append((prompt, json.loads(asked[1]), answer.partition("<|")[0]))
    return made


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def answers(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way, the same chats in all of them."""
    path = inflated_target(arguments.target)
    settings = {"dtype": "float32", "threads": arguments.threads, "cache_memory": CACHE_BYTES}
    target = Engine.from_settings(EngineSettings.model_validate({"model": str(path), **settings}))
    draft = Engine.from_settings(EngineSettings.model_validate({"model": str(DRAFT), **settings}))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    asked = tasks(arguments.requests)
    rows = []
    for way, (has_grammar, depth) in WAYS.items():
        requests = []
        for seed, (prompt, schema, _) in enumerate(asked):
            ids = tuple(tokenizer.encode(prompt).ids)
            grammar = Form("json_schema", json.dumps(schema), "schema").grammar() if has_grammar else None
            sampling = Sampling(temperature=0.0, max_tokens=arguments.tokens, grammar=grammar)
            requests.append(Request(ids, sampling, noise_key(seed, 0, ids)))
        drafter = DraftModel(draft) if depth else None
        generate(target, drafter, requests[:1], depth)  # warms up
        begun = time.perf_counter()
        outputs = [generate(target, drafter, [one], depth)[0] for one in requests]
        seconds = time.perf_counter() - begun
        said = [tokenizer.decode(list(output.tokens)) for output in outputs]
        tokens, passes = (
            sum(counts) for counts in zip(*((len(o.tokens), o.target_passes) for o in outputs), strict=True)
        )
        rows.append(
            {
                "way": way,
                "answers": len(outputs),
                "tokens": tokens,
                "target passes": passes,
                "tokens / pass": tokens / passes,
                "tokens/s": tokens / seconds,
                "valid": sum(
                    is_valid(text, schema) for text, (_, schema, _) in zip(said, asked, strict=True)
                ),
                "right": sum(text == right for text, (_, _, right) in zip(said, asked, strict=True)),
            }
        )
        print(table(rows[-1:]), flush=True)
    return rows


def vocabularies() -> Iterator[tuple[str, Tokenizer]]:
    """By what they are called."""
    small = Tokenizer.from_file(str(DRAFT / "tokenizer.json"))
    yield "demo pair", small
    installed = find_spec("mistral_common")
    if installed is None or installed.origin is None:
        yield "demo pair and pairs of its words", with_pairs(small)
    else:
        yield "Mistral", MistralConverter(str(Path(installed.origin).parent / TEKKEN)).converted()


def with_pairs(tokenizer: Tokenizer) -> Tokenizer:
    """The same with pairs of its words as tokens besides, up to LARGE; text is split as before."""
    fields, random = json.loads(tokenizer.to_str()), Random(0)
    known = fields["model"]["vocab"]
    words = [word for word in known if word.isalpha()]
    taken = {token["id"] for token in fields["added_tokens"]}
    free = (number for number in range(len(known), LARGE) if number not in taken)
    for number in free:
        pair = random.choice(words) + random.choice(words)
        while pair in known:
            pair += random.choice(words)
        known[pair] = number
    return Tokenizer.from_str(json.dumps(fields))


def masks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The time of a mask, and of a Draft's masks with what its grammar makes of it, along right answers.

    Processor time of the one thread that all of it runs in, so that others on the machine count for less.
    """
    rows = []
    for name, tokenizer in vocabularies():
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        begun = time.thread_time()
        known = token_table(tokenizer.to_str(), size)
        reading_s = time.thread_time() - begun
        compiling, one, drafted = [], list[float](), list[float]()
        for _, schema, right in tasks(arguments.requests):
            grammar = Form("json_schema", json.dumps(schema), "schema").grammar()
            begun = time.thread_time()
            matcher = Matcher(compiled(grammar, known), size, frozenset())
            compiling.append(time.thread_time() - begun)
            ids = tokenizer.encode(right, add_special_tokens=False).ids
            for position in range(len(ids)):
                begun = time.thread_time()
                matcher.masks(ids[:position], Draft(), [-1])
                one.append(time.thread_time() - begun)
                begun = time.thread_time()
                draft = Draft.chain(ids[position : position + 8])
                seen = matcher.constrained(ids[:position], draft, len(draft) + 8).draft
                matcher.masks(ids[:position], seen, range(-1, len(seen)))
                drafted.append(time.thread_time() - begun)
        rows.append(
            {
                "vocabulary": name,
                "tokens": size,
                "reading it, s": reading_s,
                "compiling, ms": 1e3 * statistics.median(compiling),
                "a mask, us": 1e6 * statistics.median(one),
                "95th percentile, us": 1e6 * statistics.quantiles(one, n=20)[-1],
                "a Draft of 8, us": 1e6 * statistics.median(drafted),
                "its 95th percentile, us": 1e6 * statistics.quantiles(drafted, n=20)[-1],
            }
        )
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench structured", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--target", choices=INFLATED, default="60M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    of_masks = masks(options)
    print(table(of_masks), flush=True)
    rows = answers(options)
    print(table(rows))
    print(save("structured", rows, masks=of_masks))
