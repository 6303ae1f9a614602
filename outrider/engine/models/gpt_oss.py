"""gpt-oss (OpenAI 2025): attention sinks, a sliding window in every other layer, experts with biases."""

from outrider.engine.models.architecture import Architecture, Mixture

GPT_OSS = Architecture(
    "GptOssForCausalLM",
    window="sliding_window",
    sinks="sinks",
    mixture=Mixture(
        router="router",
        scores="softmax of chosen",
        clamped=("alpha", "limit"),
        files=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
)
