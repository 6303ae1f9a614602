"""Settings of the services that tests start."""

from typing import Any

CACHE = 2**28
SERVED: dict[str, Any] = {  # defaults of tests
    "target": "demo-small",
    "target.threads": 1,
    "target.cache_memory": CACHE,
    "drafts.model.cache_memory": CACHE,
    "gateway.drafters": '["model"]',  # the draft worker alone, without a model in the target's process
}
