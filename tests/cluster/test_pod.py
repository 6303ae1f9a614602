"""What the manifests leave to a pod suffices: no privilege, and a root that is read-only."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.kustomize import find
from tests.k8s.overlays import built
from tests.k8s.pods_view import KEY, lay_out
from tests.k8s.reading import ray_templates
from tests.support.patience import START_S

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


def test_a_pod_serves_without_privileges_and_writes_only_to_tmp(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"NOT ROOT, OR WITHOUT ONE OF {TOOLS}: a pod cannot be imitated here")
    manifests = built("cpu")
    (tmp_path / "serve.yaml").write_text(lay_out(manifests, tmp_path, seen_at=Path("/mnt")))
    (tmp_path / "pod.sh").write_text(IN_THE_POD)
    groups = find(manifests, "RayService", "outrider")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    resources = {name: float(amount) for group in groups for name, amount in group["resources"].items()}
    variables = ray_templates(manifests)["gateway"]["spec"]["containers"][0]["env"]
    environment = {
        **{variable["name"]: variable["value"] for variable in variables if "value" in variable},
        "OUTRIDER_TOKEN": "of the workers in these tests",
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "CHECKOUT": str(CHECKOUT),
        "PYTHONPATH": str(CHECKOUT),
        "FILES": str(tmp_path),
        "RESOURCES": json.dumps(resources),
        "KEY": KEY,
        "START_S": str(int(START_S)),
    }
    # A mount, network and process namespace of its own: nothing of it outlives this command.
    command = ["unshare", "-mnpf", "--kill-child", "--mount-proc", "bash", "-c", POD]
    pod = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * START_S)
    told: dict[str, Any] = {}
    for line in filter(None, pod.stdout.splitlines()):
        told |= json.loads(line)
    assert told.keys() >= {"raylet", "proxy", "grpc", "choices", "metrics"}, pod.stderr
    assert "root" not in told
    assert told["grpc"] == told["choices"][0]["text"]
