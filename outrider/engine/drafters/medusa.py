"""Medusa: heads on the target's last hidden state, each for a position after the target's own token.

Source: Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads",
2024. A head sees neither the target's own token nor the guesses of other heads.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.decoding.outcomes import RANKS_OF_CHAINS
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.chain_drafter import choice_of, verdict_feed, verdicts_in
from outrider.engine.drafters.drafts_under_way import ChainsUnderWay
from outrider.engine.drafters.shared_head import SharedHead
from outrider.engine.drafters.target_drafter import Judging, Target, last_state, rows_at
from outrider.engine.drafters.trees import Trees
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.forward.row_graphs import ByRows
from outrider.engine.inputs.choice_input import INTEGERS, ChoiceInput, PackedRows
from outrider.engine.inputs.step_input import StepInput
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.parallel.layers import ParallelLMHead, keep_outputs
from outrider.engine.sequence import UNKNOWN
from outrider.engine.settings import EngineSettings

# Tensor names of the authors, whose last layer is the output projection: `0.0.linear.weight`, `0.1.weight`.
OF_AUTHORS = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
# Tensor names of vLLM: `blocks.0.layers.0.weight`, `lm_heads.0.weight`.
OF_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight")


class MedusaHead(nn.Module):
    """Residual layers, then an output projection. A head without its own projection uses the target's."""

    def __init__(self, layers: list[nn.Linear], projection: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.projection = projection

    def forward(self, states: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab_size] from states [num_rows, hidden_size]."""
        for layer in self.layers:
            states = states + silu(layer(states))
        logits: Tensor = self.projection(states)
        return logits


class Medusa(SharedHead):
    """Drafter of trees no deeper than the number of heads. A head's guesses do not depend on its path."""

    hidden_layers = (-1,)

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._checkpoint = HeadCheckpoint(settings, name)
        self._names = _names_of(self._checkpoint)
        self.state_size = self._checkpoint.target.hidden_size
        of_projections = [projection for _, projection in self._names if projection is not None]
        self.weight_bytes = self._bytes_of(self._checkpoint.tensors.keys() - {*of_projections})
        self.weight_bytes += -(-self._bytes_of(of_projections) // settings.tensor_parallel)
        self._target_shape = self._checkpoint.target
        self._heads = nn.ModuleList()
        self._passes: Sequence[ByRows] = ()  # forward function of each head, or its graph

    def load(self, target: Target) -> None:
        super().load(target)
        model = target.model
        for layers, projection in self._names:
            loaded = [self._linear(*names).to(model.device, model.dtype) for names in layers]
            own = None if projection is None else self._projection(projection)
            self._heads.append(MedusaHead(loaded, own or model.get_output_embeddings()))
        del self._checkpoint
        if model.device.type == "cpu":
            optimize_for_cpu(self._heads)
        self._passes = [*self._heads]

    def capture(self) -> tuple[str, ...]:
        from outrider.engine.kernels.verdict import compile_reading

        self._passes = graphs = self._target.row_graphs_of(self._passes, self.state_size)
        compile_reading(self._target.device)
        self.makes_chains = True
        return tuple(dict.fromkeys(reason for of_head in graphs for reason in of_head.capture()))

    def graph_bytes(self, rows: int, feeds: int, chains: int) -> int:
        """Returns the bytes of the states, and of the logits of one head: the graphs share memory."""
        target = self._target_shape
        return rows * (self.state_size + target.vocab_size) * target.dtype.itemsize

    def _projection(self, weight: str) -> nn.Module:
        """Returns a rank's share of a head's own output projection."""
        model, (rank, ranks), linear = self._target.model, self._share, self._linear(weight, None)
        if ranks == 1:
            return linear.to(model.device, model.dtype)
        count = linear.out_features
        return ParallelLMHead(keep_outputs(linear, rank, ranks).to(model.device, model.dtype), count)

    def _linear(self, weight: str, bias: str | None) -> nn.Linear:
        """Returns a layer with its stored weights."""
        tensors = self._checkpoint.tensors
        given = {"weight": tensors[weight]} | ({} if bias is None else {"bias": tensors[bias]})
        outputs, inputs = tensors[weight].shape
        linear = nn.Linear(inputs, outputs, bias is not None, device="meta")
        linear.load_state_dict(given, assign=True)
        return linear.requires_grad_(False)

    def _bytes_of(self, names: Iterable[str]) -> int:
        tensors, dtype = self._checkpoint.tensors, self._checkpoint.target.dtype
        return sum(tensors[name].numel() for name in names) * dtype.itemsize

    def _limited(self, request: DraftRequest) -> DraftRequest:
        return replace(request, depth=min(request.depth, len(self._heads)))

    def _begin(self, requests: Sequence[DraftRequest]) -> ChainsUnderWay | None:
        states = torch.stack([last_state(request) for request in requests])
        step = DrafterStep(num_states=len(states), positions=tuple(request.depth for request in requests))
        with self._together(step, states):
            return ChainsUnderWay.of(self._chained(step, states, choice_of(requests)))

    def _grown(self, requests: Sequence[DraftRequest]) -> Trees:
        """Makes Drafts from the target's states from which the newest tokens were chosen."""
        states = torch.stack([last_state(request) for request in requests])
        trees = Trees(requests)
        rows = trees.growing
        for head in range(len(self._heads)):
            if not rows:
                break
            step = DrafterStep(num_states=len(rows), part=head)
            states, logits = self._on_all_ranks(step, rows_at(states, rows))
            rows = trees.grow(logits)
        return trees

    def _chained(self, step: DrafterStep, states: Tensor, choice: ChoiceInput) -> Tensor:
        return self._guesses(states, choice.copied(states.device), max(step.positions))

    def _taken(self, judging: Sequence[Judging]) -> list[Judging]:
        return [*judging]

    def _begin_after(
        self, judging: Sequence[Judging], result: StepResult[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        requests = [self._limited(part.request) for part in judging]
        fed = StepInput.of(self._target.tables, [*map(verdict_feed, judging)])
        batch = self._target.lay_out(fed, choice_of(requests, (UNKNOWN,)))
        assert batch.choice is not None
        ends, told = verdicts_in(batch, result, None)
        last = torch.cat([part.committed.hidden[-len(part.rows) :] for part in judging])[:, 0]
        states, positions = last[ends], tuple(request.depth for request in requests)
        with self._together(DrafterStep(num_states=len(states), positions=positions), states):
            return self._guesses(states, batch.choice, max(positions)), told

    def _guesses(self, states: Tensor, rows: PackedRows, positions: int) -> Tensor:
        """Returns ``DraftChains.found`` at rank 0, and an empty tensor at other ranks."""
        from outrider.engine.kernels.choice import choose_on_device

        top_tokens, are_valid = list[Tensor](), list[Tensor]()
        for head in self._passes[:positions]:
            logits = head(states)
            if self._share[0] == 0:
                if top_tokens:
                    rows.integers[INTEGERS.index("position")].add_(1)
                chosen = choose_on_device(logits, rows, min(RANKS_OF_CHAINS, logits.shape[1]))
                top_tokens.append(chosen.top_tokens)
                are_valid.append(chosen.are_valid)
        if not top_tokens:
            return rows.integers.new_empty(0)
        return torch.cat([torch.stack(top_tokens), torch.stack(are_valid)[:, :, None].int()], dim=2)

    def _compute(self, step: DrafterStep, states: Tensor) -> tuple[Tensor, Tensor]:
        return states, self._passes[step.part](states)


HeadNames = tuple[list[tuple[str, str | None]], str | None]  # (weight, bias) of each layer, and projection


def _names_of(checkpoint: HeadCheckpoint) -> list[HeadNames]:
    """Returns the tensor names of each head. The config is not asked: its number of heads may be wrong."""
    checkpoint.check_verifier(checkpoint.config.get("base_model_name_or_path"))
    layers: dict[int, dict[int, dict[str, str]]] = {}
    projections: dict[int, str] = {}
    for name in checkpoint.tensors:
        if found := OF_AUTHORS.fullmatch(name):
            head, layer, linear, part = found.groups()
            if linear is None and part == "weight":
                projections[int(head)] = name
            else:
                layers.setdefault(int(head), {}).setdefault(int(layer), {})[part] = name
        elif found := OF_VLLM.fullmatch(name):
            head, layer, part, projected = found.groups()
            if projected is not None:
                projections[int(projected)] = name
            else:
                layers.setdefault(int(head), {}).setdefault(int(layer), {})[part] = name
    heads = sorted(layers.keys() | projections.keys())
    if not heads or heads != list(range(len(heads))):
        raise checkpoint.refusal(
            "its tensors are not those of Medusa heads, as 0.0.linear.weight and blocks.0.layers.0.weight: "
            f"there are {', '.join(list(checkpoint.tensors)[:3])}"
        )
    size, vocabulary = checkpoint.target.hidden_size, checkpoint.target.vocab_size
    names: list[HeadNames] = []
    for head in heads:
        of_head = [layers.get(head, {})[layer] for layer in sorted(layers.get(head, {}))]
        for parts in of_head:
            checkpoint.check_shape(parts.get("weight", f"a weight beside {parts}"), (size, size))
            if "bias" in parts:
                checkpoint.check_shape(parts["bias"], (size,))
        projection = projections.get(head)
        if projection is not None:
            checkpoint.check_shape(projection, (vocabulary, size))
        names.append(([(parts["weight"], parts.get("bias")) for parts in of_head], projection))
    return names
