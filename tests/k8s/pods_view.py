"""The files that a pod of a deployment would see, laid out in a folder of this machine."""

import re
from pathlib import Path

from outrider.demo.prompts import DEMO
from tests.fakes.authority import Authority
from tests.k8s.kustomize import Manifest, find
from tests.k8s.reading import checkpoints_of, settings_of

KEY = "a key of these tests"
MOUNTS = re.compile(r"/(?=(etc/outrider|weights)(/|$))", re.MULTILINE)


def lay_out(manifests: list[Manifest], root: Path, seen_at: Path | None = None) -> str:
    """Writes settings, keys, certificates and weights below ``root``; returns serveConfigV2 with such paths.

    The demo pair stands for whatever checkpoints are served.

    Args:
        seen_at: where ``root`` is for those who read it; None: where it is.
    """
    at = seen_at or root
    settings = root / "etc/outrider/settings"
    settings.mkdir(parents=True)
    for name, text in find(manifests, "ConfigMap", "outrider-settings")["data"].items():
        (settings / name).write_text(_below(at, text))
    for named, role in checkpoints_of(settings_of(manifests)).items():
        checkpoint = root / named.removeprefix("/")
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.symlink_to(DEMO / role)
    (root / "etc/outrider/keys").mkdir()
    (root / "etc/outrider/keys/api-keys").write_text(f"{KEY}\n")
    trust = Authority().trust()
    (root / "etc/outrider/tls").mkdir()
    for name, content in (
        ("tls.crt", trust.certificate),
        ("tls.key", trust.key),
        ("ca.crt", trust.authority),
    ):
        assert content is not None
        (root / "etc/outrider/tls" / name).write_bytes(content)
    return _below(at, find(manifests, "RayService", "outrider")["spec"]["serveConfigV2"])


def _below(at: Path, text: str) -> str:
    return MOUNTS.sub(f"{at}/", text)
