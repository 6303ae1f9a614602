"""Target drafter that is a complete model, in the target's process and on the target's device.

If draft and target were two processes on one device, they would compete for it. Each round would pass through
both processes and the gateway. Here draft and target take turns. If a target has several ranks, rank 0 holds
the draft model.

The model runs only while a Draft is wanted, so plain decoding has no extra cost. It then first prefills the
tokens that it has not seen. A long prompt is prefilled with a chunk per step, and has no Draft meanwhile.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.outcomes import Branch
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.chain_drafter import ForeseeingDrafter
from outrider.engine.drafters.drafts_under_way import DraftForeseen, DraftRead
from outrider.engine.drafters.target_drafter import Judging, Target
from outrider.engine.loading.head_checkpoint import TargetShape, checkpoint_of
from outrider.engine.loading.vocabulary import check_vocabulary
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.planning.memory import block_bytes
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings

# Settings that the draft model takes from the target.
SHARED = {"cache_dtype", "max_sequences", "self_check", "block_size", "prefill_chunk", "graphs", "device"}


class Colocated(ForeseeingDrafter):
    """Drafter that makes the same chains and alternatives as a draft worker with this model."""

    has_alternatives = True

    def __init__(self, settings: EngineSettings, name: str) -> None:
        """
        Raises:
            VocabularyMismatchError: a token id stands for different tokens in the two models.
        """
        super().__init__(settings, name)
        checkpoint = checkpoint_of(settings, name)
        check_vocabulary(settings.model, checkpoint)
        target = TargetShape.of(settings)
        self._vocab_size = target.vocab_size
        of_draft = {
            "model": checkpoint,
            "is_draft": True,
            "dtype": str(target.dtype).removeprefix("torch."),
            "quantization": settings.drafters[name].quantization,
        }
        shared = settings.model_dump(include=SHARED)
        self._settings = EngineSettings.model_validate({**shared, **of_draft})
        model = skeleton(self._settings)
        self.cache_shapes = tuple(model.layers.values())
        self._block = block_bytes(self._settings, model.layers, model.dtype)
        self._model: DraftModel | None = None
        plan = plan_memory(model, self._settings.model_copy(update={"cache_memory": self._block}), 0, depth=0)
        self.weight_bytes = plan.weights + plan.activations + plan.graphs
        self._slow_because: tuple[str, ...] = ()

    def load(self, target: Target) -> None:
        """Records the target's device; ``allocate`` loads the model with its cache."""
        self._target = target
        self._is_leader = target.group is None or target.group.rank == 0
        self._settings = self._settings.model_copy(
            update={"device": str(target.device), "device_share": target.settings.device_share}
        )

    def allocate(self, num_blocks: int) -> None:
        """Loads the model, with a cache for as many tokens as the target's holds."""
        if not self._is_leader:
            return
        cache = {"cache_memory": num_blocks * self._block}
        forward = load_forward_pass(self._settings.model_copy(update=cache))
        engine = Engine(ModelRunner(forward, None))  # grammars are compiled by the target's engine
        self._slow_because = engine.runner.slow_because
        self._model = DraftModel(engine, self._vocab_size, forward)
        self.makes_chains = forward.draft_graphs is not None

    def capture(self) -> tuple[str, ...]:
        """Returns why steps of the model, which its engine has captured, are slower than they could be."""
        if self.makes_chains:
            from outrider.engine.kernels.verdict import compile_reading

            compile_reading(self._target.device)
        return self._slow_because

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Runs as many steps of the draft model as the deepest Draft has tokens."""
        assert self._model is not None
        drafts = self._model.propose_within(max(request.depth for request in requests), requests)
        pairs = zip(requests, drafts, strict=True)
        self.top_tokens = [self._model.top_tokens_of(request.sequence, draft) for request, draft in pairs]
        return drafts

    def read(self, foreseen: DraftForeseen, request: DraftRequest) -> DraftRead:
        assert self._model is not None
        read = super().read(foreseen, request)
        return replace(read, draft=self._model.with_alternatives(read, request))

    def _taken(self, judging: Sequence[Judging]) -> list[Judging]:
        assert self._model is not None
        return self._model.with_room_after(judging)

    def _begin_after(
        self, judging: Sequence[Judging], result: StepResult[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        assert self._model is not None
        return self._model.begin_after(judging, result)

    def branches(self, request: DraftRequest) -> Sequence[Branch]:
        assert self._model is not None
        return self._model.branches(request)

    def keep(self, sequence: EngineSequence) -> None:
        assert self._model is not None
        self._model.keep(sequence)

    def clear(self, sequence: EngineSequence) -> None:
        assert self._model is not None
        self._model.clear(sequence)

    def forget(self, sequence: DraftedSequence) -> None:
        if self._model is not None:
            self._model.forget(sequence)
