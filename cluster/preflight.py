"""Checks, before Serve and the workers start, that the models are compatible and fit.

The check needs torch and transformers. So it runs in a process of its own, which imports them while Ray
starts and frees their memory when it exits.
"""

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.settings import Settings
from outrider.engine.errors import EngineError


@dataclass(frozen=True)
class Found:
    settings: Settings  # settings with the bytes of caches that were left open, if there is a plan
    table: str | None = None  # memory plan; None: the devices' memory is not known
    refusal: Exception | None = None  # reason why the models may not be served


class Preflight:
    """Process of the check. It ends after its answer, or at the exit of the context."""

    def __enter__(self) -> "Preflight":
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def find(self, settings: Settings, *, here: bool, asked: Mapping[str, int]) -> Found:
        """Runs ``find`` in the process. Raises RuntimeError if the process ends without an answer."""
        answer, _ = self._process.communicate(pickle.dumps((settings, here, asked)))
        if self._process.returncode:
            raise RuntimeError(f"the models could not be looked at: exit status {self._process.returncode}")
        found: Found = pickle.loads(answer)
        return found


def find(settings: Settings, *, here: bool, asked: Mapping[str, int]) -> Found:
    """Checks models and memory.

    settings: settings with the GPUs of each worker.
    here: whether the devices are this machine's.
    asked: bytes of each GPU by group of settings, as nodes report them.
    """
    from cluster.devices import memories
    from cluster.plan import DeploymentPlan
    from cluster.plan_table import plan_table
    from outrider.demo.written_out import write_out
    from outrider.engine.loading.shares import check_shares
    from outrider.engine.loading.special_tokens import drafts_in_parallel
    from outrider.engine.loading.vocabulary import check_vocabulary

    found = Found(settings)
    try:
        write_out(settings.target.model)
        for draft in settings.drafts.values():
            check_vocabulary(settings.target.model, draft.model)
        models = {name: draft.model for name, draft in settings.drafts.items()}
        parallel = [name for name, model in models.items() if drafts_in_parallel(model)]
        settings = settings.with_parallel_drafts(parallel)
        found = Found(settings)
        check_shares(settings.target_engine())
        if sizes := memories(settings, here=here, asked=asked):
            deployment = DeploymentPlan(settings, sizes)
            found = Found(deployment.settings, plan_table(deployment))
            deployment.check()
    except EngineError as error:
        return Found(found.settings, found.table, error)
    except (ValueError, OSError) as error:  # also errors of libraries, which cannot always be pickled
        return Found(found.settings, found.table, ValueError(str(error)))
    return found


def main() -> None:
    answer, sys.stdout = sys.stdout.buffer, sys.stderr  # output of libraries must not mix with the answer
    gc.disable()  # garbage collection would take a fifth of the time
    import outrider.engine.planning.skeleton  # noqa: F401 loads torch and transformers before the question comes

    settings, here, asked = pickle.load(sys.stdin.buffer)
    pickle.dump(find(settings, here=here, asked=asked), answer)
