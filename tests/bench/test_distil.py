"""What the demo draft is fitted to and judged on, and that the whole of it runs."""

import argparse
import json

import pytest

from bench import distil, report
from bench.drafting import asked_of
from outrider.demo.prompts import KINDS, prompts
from workshop.demo.consignments import KIND, consignments

SMALL = {"texts": 12, "steps": 2, "prompts": 1, "tokens": 12, "depth": 2, "threads": 1}


def test_no_draft_is_fitted_to_what_it_is_judged_on() -> None:
    options = argparse.Namespace(texts=400, prompts=16)
    texts = [*consignments(options.prompts, distil.JUDGING_SEED)]
    texts += [text for kind in KINDS for text in prompts(kind, options.prompts)]
    judged = {request.prompt for request in asked_of(texts, temperature=0.0, tokens=1)}
    assert len(judged) == options.prompts * (1 + len(KINDS))
    tasks = {}
    for name, asked in distil.traffic(options):
        assert judged.isdisjoint(one.tokens for one in asked)
        tasks[name] = {one.task for one in asked}
    assert tasks == {distil.ALONE: {KIND}, distil.AMONG_OLD: {KIND, *KINDS}}


@pytest.mark.slow
def test_a_row_for_each_draft_and_kind_of_text(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    distil.main([part for name, value in SMALL.items() for part in (f"--{name}", str(value))])
    stored = json.loads((tmp_path / "distil.json").read_text())
    drafts = (distil.BEFORE, distil.ALONE, distil.AMONG_OLD)
    kinds = [(kind, draft) for kind in (KIND, *KINDS) for draft in drafts]
    assert [(row["kind"], row["draft"]) for row in stored["rows"]] == kinds
    assert all(1.0 <= row["tokens per pass"] <= 3.0 for row in stored["rows"])
    assert [row["fitted to"] for row in stored["taken"]] == [distil.ALONE, distil.AMONG_OLD]
    assert all(row["steps"] == 2 for row in stored["taken"])
