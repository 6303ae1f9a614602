"""One slip in a set of manifests, to see that a check notices it."""

import json
from typing import Any

from tests.k8s.kustomize import Manifest, find
from tests.k8s.reading import pod_templates

GONE = object()


def mutated(manifests: list[Manifest], place: str, value: Any) -> list[Manifest]:
    """A copy in which something is another value, or GONE.

    Args:
        place: ``Kind/name/path/of/keys/and/indices``, or ``name/path`` into the pod template of a worker
            group, the head or a Deployment; ~1 is a slash in a key.
    """
    copied: list[Manifest] = json.loads(json.dumps(manifests))
    first, *path = (part.replace("~1", "/") for part in place.split("/"))
    node: Any = pod_templates(copied).get(first) or find(copied, first, path.pop(0))
    *way, last = path
    for key in way:
        node = node[int(key) if isinstance(node, list) else key]
    if value is GONE:
        del node[int(last) if isinstance(node, list) else last]
    else:
        node[int(last) if isinstance(node, list) else last] = value
    return copied
