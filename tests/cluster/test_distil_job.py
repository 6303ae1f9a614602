"""`outrider distil` as a Ray job: it trains on a worker that has what it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from tests.support.machines import raylets
from tests.support.running import free_port
from workshop.demo.consignments import KIND, consignments

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
FITTING = "--steps 4 --measure-every 2 --threads 1 --learning-rate 0.002 --tokens 16"


def test_draft_is_fitted_on_the_worker_that_has_a_gpu(tmp_path: Path) -> None:
    asked = [json.dumps({"prompt": text, "task": KIND}) for text in consignments(24)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(asked))
    port = free_port()
    # Jobs go to a node's agent, whose usual port may be that of another service's Ray on this machine.
    head = {"include_dashboard": True, "dashboard_port": port, "dashboard_agent_listen_port": free_port()}
    with raylets(num_cpus=1, **head) as cluster:
        trainer = cluster.add_node(num_cpus=1, num_gpus=1, dashboard_agent_listen_port=free_port())
        address = f"http://127.0.0.1:{port}"
        command = [
            *f"{BIN}/ray job submit --address {address} --entrypoint-num-gpus 1 --".split(),
            *f"{BIN}/outrider distil --prompts {tmp_path}/prompts.jsonl --out {tmp_path}/fitted".split(),
            *FITTING.split(),
        ]
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
        assert run.returncode == 0, run.stdout + run.stderr
        assert "Acceptance on held-out prompts" in run.stdout
        (job,) = JobSubmissionClient(address).list_jobs()
        assert job.driver_node_id == trainer.node_id
    assert (tmp_path / "fitted" / "model.safetensors").exists()
