"""What the manifests leave to a pod suffices: no privilege, and a root that is read-only."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.demo.prompts import DEMO
from tests.k8s.kustomize import find
from tests.k8s.overlays import built
from tests.k8s.pods_view import KEY, lay_out
from tests.k8s.reading import ray_templates
from tests.support.patience import START_S
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
TOOLS = ("unshare", "setpriv", "ip", "wget", "curl")
POD = """
set -e
ip link set lo up
mount --bind "$FILES" /mnt
mount --bind "$CHECKOUT" /media
mount -t tmpfs -o mode=1777 none /tmp
mount -t tmpfs -o mode=1777 none /dev/shm
mkdir -p "$CHECKOUT"  # it may have been in /tmp
mount --bind /media "$CHECKOUT"
mount -o remount,ro,bind "$CHECKOUT"
mount -o remount,ro,bind /
cd /tmp
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all bash /mnt/pod.sh
"""
IN_THE_POD = """
touch /written 2>/dev/null && echo '{"root": "writable"}'
export HOME=/nowhere
ray() { "$PYTHON" -m ray.scripts.scripts "$@"; }
ray start --head --num-cpus=0 --port=6379 --metrics-export-port=8080 --resources="$RESOURCES" >&2
"$PYTHON" -m ray.serve.scripts deploy /mnt/serve.yaml >&2  # through the dashboard, as KubeRay does
ask() { curl -s -H "Authorization: Bearer $KEY" "http://127.0.0.1:8000$@"; }
for _ in $(seq "$START_S"); do
    ask /health | grep -q '"draft"' && break
    sleep 1
done
# As KubeRay does:
probe() { wget -T 2 -q -O- "http://localhost:$1" | grep -q success && echo "{\\"$2\\": \\"well\\"}"; }
probe 52365/api/local_raylet_healthz raylet
probe 8000/-/healthz proxy
OUTRIDER_API_KEY=$KEY "$PYTHON" -c '
import json, os
from outrider.client.client import Client
with Client("127.0.0.1:9000", os.environ["KEY"]) as client:
    answer = client.generate("1, 2, 3,", max_tokens=8, temperature=0.0)
    print(json.dumps({"grpc": "".join(piece.text for piece in answer)}))
'
body='{"prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0}'
ask /v1/completions -H "Content-Type: application/json" -d "$body"
echo
curl -s http://127.0.0.1:8080/metrics | grep -q ^ray_ && echo '{"metrics": "there"}'
"""
# What a GPU worker does before it can serve, without the GPU.
COMPILE_IN_THE_POD = """
touch /written 2>/dev/null && echo '{"root": "writable"}'
export HOME=/nowhere TRITON_INTERPRET=0
"$PYTHON" -m tests.support.ahead_of_time "$MODEL"
env -u TRITON_CACHE_DIR "$PYTHON" -m tests.support.ahead_of_time "$MODEL"
"""
KERNELS = {"attend_tile", "_choose", "_gate", "_norm", "_rotate_and_store", "find_path"}


def in_a_pod(folder: Path, script: str, environment: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """What the script prints in a pod's confines, JSON line by line, and what it says beside that.

    Args:
        folder: the pod finds it at /mnt.
        environment: variables beside those of the manifests.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"NOT ROOT, OR WITHOUT ONE OF {TOOLS}: a pod cannot be imitated here")
    (folder / "pod.sh").write_text(script)
    variables = ray_templates(built("cpu"))["target"]["spec"]["containers"][0]["env"]
    told = {
        **{variable["name"]: variable["value"] for variable in variables if "value" in variable},
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "CHECKOUT": str(CHECKOUT),
        "PYTHONPATH": str(CHECKOUT),
        "FILES": str(folder),
        **environment,
    }
    # A mount, network and process namespace of its own: nothing of it outlives this command.
    command = ["unshare", "-mnpf", "--kill-child", "--mount-proc", "bash", "-c", POD]
    pod = subprocess.run(command, env=told, capture_output=True, text=True, timeout=2 * START_S)
    return [json.loads(line) for line in filter(None, pod.stdout.splitlines())], pod.stderr


def test_pod_serves_without_privileges_and_writes_only_to_tmp(tmp_path: Path) -> None:
    manifests = built("cpu")
    (tmp_path / "serve.yaml").write_text(lay_out(manifests, tmp_path, seen_at=Path("/mnt")))
    groups = find(manifests, "RayService", "outrider")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    resources = {name: float(amount) for group in groups for name, amount in group["resources"].items()}
    environment = {
        "OUTRIDER_TOKEN": "of the workers in these tests",
        "RESOURCES": json.dumps(resources),
        "KEY": KEY,
        "START_S": str(int(START_S)),
    }
    lines, said = in_a_pod(tmp_path, IN_THE_POD, environment)
    told: dict[str, Any] = {}
    for line in lines:
        told |= line
    assert told.keys() >= {"raylet", "proxy", "grpc", "choices", "metrics"}, said
    assert "root" not in told
    assert told["grpc"] == told["choices"][0]["text"]


@needs_compiler
def test_pod_compiles_the_kernels_of_a_gpu_and_keeps_them_in_tmp(tmp_path: Path) -> None:
    """Compiles in the folder that the manifests name, and without it in a folder of its own."""
    pytest.importorskip("triton.backends.nvidia", reason="needs triton with ptxas: pip install triton")
    lines, said = in_a_pod(tmp_path, COMPILE_IN_THE_POD, {"MODEL": str(DEMO / "target")})
    assert [line.get("folder") for line in lines] == ["/tmp/triton", f"/tmp/triton-{os.getuid()}"], said
    assert all(set(line["kernels"]) >= KERNELS for line in lines)
