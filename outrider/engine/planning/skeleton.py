"""Model without its weights: the sizes of its tensors and passes, from the checkpoint's config alone."""

import math
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from outrider.engine.adapters.adapters import Adapters
from outrider.engine.adapters.checkpoint import joined_with, may_change
from outrider.engine.cache.key_values import LayerShape
from outrider.engine.cache.recurrent_states import StateShape
from outrider.engine.cache.windowed_blocks import WindowedLayers
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import ATTENTION, Probe
from outrider.engine.forward.batch_invariant import are_experts, why_rows_mix
from outrider.engine.forward.kernel import why_no_cpu_kernel
from outrider.engine.forward.latent import may_cache_latents, use_latents
from outrider.engine.forward.linear import why_unpacked
from outrider.engine.forward.output import states_of
from outrider.engine.loading.context import context_length
from outrider.engine.loading.kinds import check_kind, check_states
from outrider.engine.loading.quantized import GROUP, OUTPUTS_INT4
from outrider.engine.loading.shares import heads_of_rank, numbers_of, ranks_that_share
from outrider.engine.loading.stored import check_stored
from outrider.engine.loading.stored_checkpoint import StoredCheckpoint, is_quantized, share_of
from outrider.engine.loading.text_part import served_config
from outrider.engine.loading.weights import attach, resolve_device, type_of
from outrider.engine.models.architecture import Architecture
from outrider.engine.models.registry import architecture_of, mixtures_in
from outrider.engine.parallel.plan import generic, style_of_stored
from outrider.engine.planning.promise import Promise, first_promise
from outrider.engine.settings import EngineSettings, Quantization

PASSED = torch.bfloat16  # type of the fake tensors: experts accept no other type
BITS_OF_ZERO, BYTES_OF_FACTOR = 16, 4  # in a stored weight: zero of a group, factor of an output
DECODER_KERNELS = 10  # kernels of a decoder layer, without norms of query and key heads
MLP_KERNELS = 3  # kernels of a gated product, which DECODER_KERNELS includes
# Kernels of a mixture: rows to float32, scores, choice, order, two products, sum. The weight of a shared
# product takes four more: the weight's product and sigmoid, a multiplication, and an addition.
MIXTURE_KERNELS, SHARED_GATE_KERNELS = 7, 4
# Kernels of a pool for windowed layers: five find its slots. If other layers have full attention, two more
# parts of the cache are checked, with four kernels each.
SLOT_KERNELS, CHECK_KERNELS = 5, 8
BYTES_OF_OUTPUT = 16  # bytes per output in 8 bit on a CPU: a scale, a zero, the sum that oneDNN keeps


class ModelSkeleton:
    """Model of fake tensors, with which the memory and the operations of passes are counted."""

    def __init__(
        self,
        config: Any,
        name: str,
        dtype: torch.dtype | None = None,
        checkpoint: StoredCheckpoint | None = None,
        drafters: TargetDrafters | None = None,
        *,
        adapter_weights: int = 0,
        loaded_ranks: int = 0,
    ) -> None:
        """
        Args:
            config: config of transformers.
            name: name of the model, for messages.
            dtype: type of weights and cache; None: the config's, or float32 if it names no type.
            checkpoint: its quantized weights; None: they are not quantized.
            drafters: drafters of the model as a target; None: it has none.
            adapter_weights: number of weights of the adapters that the target's settings name.
            loaded_ranks: sum of the ranks of adapters that requests may load.

        Raises:
            UnsupportedModelError: the model cannot run on the paged cache.
        """
        self.name = name
        self.dtype: torch.dtype = dtype or type_of(config)
        self._drafters = drafters or TargetDrafters()
        self._adapter_weights = adapter_weights
        self._fake = FakeTensorMode()
        self._activations: dict[tuple[int, int], int] = {}  # bytes by (tokens, logits)
        check_kind(config, name)
        try:
            with self._fake:
                self._model = AutoModelForCausalLM.from_config(config, dtype=PASSED).eval()
                if may_cache_latents(self.dtype):
                    use_latents(self._model, ATTENTION)
                probe = attach(self._model, name)
        except (ValueError, KeyError) as error:
            raise UnsupportedModelError(f"model={name!r} is no decoder-only model: {error}") from error
        self._stored = {} if checkpoint is None else checkpoint.layers(self._model)
        self.layers: Mapping[int, LayerShape] = probe.shapes
        self.states: Mapping[int, StateShape] = probe.states
        self.windowed = WindowedLayers.of(probe.windows, context_length(self._model))
        self._adapter_weights += loaded_ranks * sum(
            module.in_features + joined_with(name) * module.out_features
            for name, module in self._model.named_modules()
            if may_change(name) and isinstance(module, nn.Linear)
        )
        names = {module: name for name, module in self._model.named_modules()}
        self._attentions = {layer: names[module] for layer, module in probe.modules.items()}
        text = self._model.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.hidden_size: int = text.hidden_size
        self.context_length = context_length(self._model)
        self.parameters = sum(weight.numel() for weight in self._model.parameters())
        self._experts = {  # weights [experts, ...]
            f"{path}.{name}": weight
            for path, module in self._model.named_modules()
            if are_experts(path, module)
            for name, weight in module.named_parameters(recurse=False)
        }
        self._query_heads = max(numbers_of(text, "num_attention_heads"))  # heads of the widest layer

    def promise(self, settings: EngineSettings) -> Promise:
        """Returns how far its engine keeps the first promise."""
        why_refused = why_rows_mix(self._model)
        if why_refused is None and resolve_device(settings.device).type == "cpu":
            why_refused = why_no_cpu_kernel(self.layers_of(settings.tensor_parallel), self.dtype)
        return first_promise(
            settings,
            str(self.dtype).removeprefix("torch."),
            is_quantized=settings.quantization is not None or is_quantized(self._model.config),
            why_refused=why_refused,
        )

    def weight_bytes(
        self, devices: int = 1, quantization: Quantization | None = None, *, on_cuda: bool = True
    ) -> int:
        """Returns the bytes of weights on each of ``devices``, shared by transformers' tensor parallelism.

        A tied embedding is stored twice if the output projection is quantized, or packed on a CPU: see
        outrider/engine/forward/linear.py.
        """
        head = self._model.get_output_embeddings()
        size: int = self._drafters.weight_bytes + sum(buffer.nbytes for buffer in self._model.buffers())
        size += self._adapter_weights * self.dtype.itemsize
        for name, weight in self._model.named_parameters():
            owner = self._model.get_submodule(name.rpartition(".")[0])
            is_linear = type(owner) is nn.Linear and name.endswith(".weight")
            kind = quantization if is_linear else None
            kept = self._stored.get(name.removesuffix(".weight"))
            if kept is not None and kind is None:
                style = style_of_stored(name.removesuffix(".weight"), self._model)
                parts = self._parts_of(name, devices)
                size += share_of(kept, style, 0, parts).num_bytes
                continue
            whole = self._bytes_of(weight, kind, on_cuda, is_head=owner is head)
            size += -(-whole // self._parts_of(name, devices))
        is_tied = head is not None and head.weight is self._model.get_input_embeddings().weight
        is_packed = is_tied and not on_cuda and why_unpacked(self.dtype, *head.weight.shape) is None
        if is_packed or (is_tied and quantization is not None):
            copied = self._bytes_of(head.weight, quantization, on_cuda, is_head=True)
            size += -(-copied // devices)
        return size

    def _bytes_of(self, weight: Tensor, kind: Quantization | None, on_cuda: bool, is_head: bool) -> int:
        """Returns the bytes of a weight in the form that loading/quantized.py gives it."""
        return math.ceil(weight.numel() * self._bits_of(weight, kind, on_cuda, is_head) / 8)

    def _bits_of(self, weight: Tensor, kind: Quantization | None, on_cuda: bool, is_head: bool) -> float:
        bits = 8.0 * max(self.dtype.itemsize, weight.itemsize)  # some routers stay in float32
        if kind is None:
            return bits
        outputs, inputs = weight.shape
        if kind == "int4" and not is_head and inputs % GROUP == 0:
            if on_cuda:
                return 4 + (bits + BITS_OF_ZERO) / GROUP
            if outputs % OUTPUTS_INT4 == 0:
                return 4 + 2 * bits / GROUP
        return 8 + 8 * (BYTES_OF_FACTOR if on_cuda else BYTES_OF_OUTPUT) / inputs

    def _parts_of(self, parameter: str, devices: int) -> int:
        """Returns the number of devices that share a parameter; 1: each device holds all of it."""
        module, _, projection = parameter.rpartition(".")[0].rpartition(".")
        makes_heads = module in self._attentions.values() and projection in ("k_proj", "v_proj")
        heads = None
        if makes_heads:
            heads = next(self.layers[layer][0] for layer, name in self._attentions.items() if name == module)
        return ranks_that_share(parameter, self._model.tp_plan, devices, heads)

    def layers_of(self, devices: int) -> dict[int, LayerShape]:
        """Returns the shapes of cached layers at each of ``devices``, for the model and its target drafters.

        The devices must be able to share the model (shares.check_shares).
        """
        plan = self._model.tp_plan
        shared = {
            layer: (heads_of_rank(heads, self._attentions[layer], plan, devices), key, value)
            for layer, (heads, key, value) in self.layers.items()
        }
        return shared | self._drafters.numbered_shapes

    def query_heads_of(self, devices: int) -> int:
        """Returns the query heads of the widest layer at each of ``devices``."""
        plan, names = self._model.tp_plan, self._attentions.values()
        return max(heads_of_rank(self._query_heads, name, plan, devices) for name in names)

    def states_of(self, devices: int) -> dict[int, StateShape]:
        """Returns the shapes of recurrent states at each of ``devices``, which must divide their groups."""
        return {layer: shape.share(devices) for layer, shape in self.states.items()}

    def expert_bytes(self, devices: int) -> int:
        """Returns the bytes of experts on each of ``devices``."""
        size = 0
        for name, weight in self._experts.items():
            kept = self._stored.get(name)
            whole = weight.numel() * self.dtype.itemsize if kept is None else kept.num_bytes
            size += -(-whole // self._parts_of(name, devices))
        return size

    @property
    def expert_share(self) -> float:
        """Share of a layer's experts that a token chooses; 1 without experts."""
        count: int = max((len(weight) for weight in self._experts.values()), default=1)
        chosen = numbers_of(self._model.config.get_text_config(), "num_experts_per_tok")
        return min(max(chosen, default=count) / count, 1.0)

    def activation_bytes(self, num_tokens: int, num_logits: int) -> int:
        """Returns the peak bytes of a step of ``num_tokens`` through all layers."""
        size = num_tokens, num_logits
        if size not in self._activations:
            self._activations[size] = self._pass(num_tokens, num_logits).peak
        return self._activations[size] * self.dtype.itemsize // PASSED.itemsize

    def widened_bytes(self) -> int:
        """Returns the bytes of the largest layer when its stored weights are dequantized, on a CPU.

        Its numbers exist twice in float32: as they are dequantized, and as a product reads them.
        """
        sizes: Counter[str] = Counter()
        for name, weight in self._stored.items():
            at_once = len(self._experts[name]) if name in self._experts else 1  # one expert at a time
            sizes[name.rpartition(".")[0]] += math.prod(weight.shape) // at_once
        return max(sizes.values(), default=0) * 2 * torch.float32.itemsize

    def state_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of a step's hidden states that target drafters read."""
        size: int = self._model.config.get_text_config().hidden_size
        return num_tokens * len(self._drafters.hidden_layers) * size * self.dtype.itemsize

    def drafting_graph_bytes(self, rows: int, feeds: int, chains: int) -> int:
        """Returns the bytes of CUDA graphs of target drafters. Arguments as for ``graph_bytes``."""
        return self._drafters.graph_bytes(rows, feeds, chains)

    def waiting_bytes(self) -> int:
        """Returns the bytes of hidden states that wait until a target drafter takes them in."""
        return self._drafters.waiting_bytes()

    def flops_per_token(self) -> float:
        """Returns the operations of a token's products with weights, its logits included."""
        tokens = 8
        with FlopCounterMode(display=False) as flops:
            self._pass(tokens, tokens)
        # torch does not count the operations of transformers' products of experts.
        numbers: int = sum(weight.numel() for weight in self._experts.values())
        return float(flops.get_total_flops()) / tokens + 2 * self.expert_share * numbers

    def layer_kernels(self) -> int:
        """Returns the number of kernels that a pass through all layers launches on a GPU.

        Without the fast decoder (outrider/engine/forward/decoder.py) transformers' layers launch them.
        """
        architecture = architecture_of(self._model)
        if architecture and getattr(self._model.config, architecture.activation) == "silu":
            layers = self._model.get_submodule(architecture.layers)
            counts = int(any(mixtures_in(self._model)))  # a kernel sets the counter of experts to 0
            if self.windowed is not None:
                counts += SLOT_KERNELS + CHECK_KERNELS * (len(self.windowed.layers) < len(layers))
            return counts + sum(kernels_of_layer(layer, architecture) for layer in layers)
        return self._pass(1, 1).kernels + len(self.layers)  # each layer also writes into its cache

    def looked_up_bytes(self, devices: int) -> int:
        """Returns the bytes of weights that no step reads as a whole: an embedding that is not tied."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if head is not None and head.weight is embedding.weight:
            return 0
        name = next(name for name, module in self._model.named_modules() if module is embedding)
        size: int = embedding.weight.numel() * self.dtype.itemsize
        return -(-size // self._parts_of(f"{name}.weight", devices))

    def modules_in(self, styles: Collection[str]) -> int:
        """Returns the number of modules that tensor parallelism shares in these styles."""
        plan = self._model.tp_plan
        return sum(plan.get(generic(name)) in styles for name, _ in self._model.named_modules() if name)

    def _pass(self, num_tokens: int, num_logits: int) -> "AliveBytes":
        with self._fake, torch.inference_mode():
            ids = torch.zeros(1, num_tokens, dtype=torch.int64)
            rows = torch.zeros(num_logits, dtype=torch.int64)
            alive = AliveBytes()
            with alive:
                output = self._model(
                    input_ids=ids,
                    position_ids=ids,
                    use_cache=False,
                    logits_to_keep=rows,
                    output_hidden_states=self._drafters.hidden_layers or False,
                    outrider=Probe(),
                )
                states_of(output.hidden_states, self._drafters.hidden_layers)
        return alive


def kernels_of_layer(layer: Any, architecture: Architecture) -> int:
    """Returns the kernels of a layer of the decoder on a GPU."""
    attention, mlp = layer.get_submodule(architecture.attention), layer.get_submodule(architecture.mlp)
    mixture, has_bias = (
        architecture.mixture,
        getattr(attention, architecture.attention_output).bias is not None,
    )
    kernels = DECODER_KERNELS + has_bias  # with a bias, a separate kernel adds the states
    named = architecture.query_key_norm or ()
    norms = [getattr(attention, name).weight for name in named if hasattr(attention, name)]
    if norms:  # norms per head take one kernel, norms over all query heads and over all key heads take two
        kernels += 1 if norms[0].numel() == attention.head_dim else 2
    if mixture is None or not hasattr(mlp, mixture.experts):
        return kernels
    kernels += MIXTURE_KERNELS - MLP_KERNELS
    if mixture.shared is not None:
        kernels += MLP_KERNELS + (0 if mixture.shared_gate is None else SHARED_GATE_KERNELS)
    return kernels


def skeleton(settings: EngineSettings) -> ModelSkeleton:
    """Returns the skeleton of a checkpoint. Raises OSError if there is none, or UnsupportedModelError."""
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    config = served_config(settings.model)
    check_states(config, settings)
    check_stored(settings.model, config)
    checkpoint = StoredCheckpoint(config, settings.model) if is_quantized(config) else None
    drafters = TargetDrafters.of(settings)
    return ModelSkeleton(
        config,
        settings.model,
        dtype,
        checkpoint,
        drafters,
        adapter_weights=Adapters(settings.adapters).num_weights,
        loaded_ranks=0
        if settings.adapter_folder is None
        else settings.max_loaded_adapters * settings.max_adapter_rank,
    )


class AliveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the peak of the bytes of their results that are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.kernels = 0  # operations that made or changed a tensor
        self._total = 0
        self._alive: set[int] = set()  # keys of storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        made = [storage for storage in _storages(output) if storage._cdata not in given]
        self.kernels += bool(made) or func._schema.is_mutable
        for storage in made:  # neither a view nor written in place
            self._follow(storage)
        return output

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self._total += size
            self.peak = max(self.peak, self._total)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self._total -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
