"""vLLM's ``speculative_config``."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from outrider.pace.settings import MAX_DEPTH
from outrider.ray.mirror import Mirror, without_meaning

# Row of the registry for each method of vLLM. Methods that end with "mtp" have the row mtp.
DRAFTERS = {
    "draft_model": "model",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "dflash": "dflash",
    "ngram": "ngram",
    "suffix": "suffix",
}
IN_PARALLEL = {"model": "parallel", "eagle3": "peagle"}  # rows with ``parallel_drafting``, by usual row
MTP = "mtp"
WITHOUT_MODEL = {"ngram", "suffix", MTP}
NAMED_AFTER_METHOD = ("eagle3", "medusa", "dflash")  # methods that are recognized by the name of a checkpoint
BY_DOWNLOAD = "python -m outrider.engine.loading.download gets owner/name@revision into a folder: name that"
PACE_DECIDES = "the pace decides the depth of each Draft by what pays"

CheckpointQuantization = Literal[
    "int8", "int4", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt",
    "modelopt_fp4", "mxfp4",
]  # fmt: skip
AT_LOAD = ("int8", "int4")  # quantizations that Outrider applies itself


class SpeculativeConfig(Mirror):
    """Speculation, as vLLM's ``speculative_config`` names it: nested, or as JSON."""

    method: str | None = Field(
        default=None,
        description="draft_model: drafts.model; eagle3, medusa, dflash and names that end with mtp:"
        " target.drafters; ngram, suffix: gateway.drafters. None: what the name of the model says",
    )
    model: str | None = Field(
        default=None, min_length=1, description="drafts.model.model, or the checkpoint of the target drafter"
    )
    num_speculative_tokens: int | None = Field(
        default=None, ge=1, le=MAX_DEPTH, description="pace.max_depth: the most, as the pace may draft fewer"
    )
    parallel_drafting: bool = Field(
        default=False, description="with a draft model the drafter parallel, with eagle3 the drafter peagle"
    )
    quantization: CheckpointQuantization | None = Field(
        default=None,
        description="drafts.model.quantization if it is int8 or int4; others only say what the checkpoint"
        " holds. fp8: name a checkpoint that is stored so, and leave this out",
    )
    draft_tensor_parallel_size: Literal[1] | None = Field(
        default=None, description="a draft model runs on one device, and a target drafter on the target's"
    )
    rejection_sample_method: Literal["strict"] | None = Field(
        default=None,
        description="coupled verification is as strict. Other rules change the text, so a request asks"
        " for them: speculation.verification",
    )
    revision: Literal[None] = Field(
        default=None,
        description=BY_DOWNLOAD,
    )
    suffix_decoding_max_cached_requests: int | None = Field(
        default=None,
        ge=0,
        description="0: gateway.past_answer_tokens=0. Other numbers have no meaning here, as that setting"
        " bounds tokens and not requests",
    )
    prompt_lookup_min: Any = without_meaning("the longest match of any length is taken")
    prompt_lookup_max: Any = without_meaning("the longest match of any length is taken")
    suffix_decoding_max_tree_depth: Any = without_meaning(PACE_DECIDES)
    suffix_decoding_max_spec_factor: Any = without_meaning(PACE_DECIDES)
    suffix_decoding_min_token_prob: Any = without_meaning(PACE_DECIDES)
    speculative_token_tree: Any = without_meaning("the width of a Draft follows from what is free")
    max_model_len: Any = without_meaning("a draft stops at the end of its context, and the target goes on")
    disable_by_batch_size: Any = without_meaning(PACE_DECIDES)
    disable_padded_drafter_batch: Any = without_meaning("Drafts of different depths share a step")
    enforce_eager: Any = without_meaning("passes are captured as graphs if that is possible")

    @field_validator("method")
    @classmethod
    def _is_known(cls, method: str | None) -> str | None:
        if method is not None and method not in DRAFTERS and not method.endswith(MTP):
            known = ", ".join((*DRAFTERS, MTP))
            raise ValueError(f"{method!r} is no method here: give {known}, or leave speculative_config out")
        return method

    @model_validator(mode="after")
    def _has_all_it_needs(self) -> "SpeculativeConfig":
        if self.method is None and self.model is None:
            raise ValueError("give method, or a model to draft with")
        if self.model is None and self.row not in WITHOUT_MODEL:
            raise ValueError(f"method {self.method!r} needs the checkpoint that drafts: give model")
        if self.parallel_drafting and self.row not in IN_PARALLEL.values():
            raise ValueError("parallel_drafting goes with a draft model or with eagle3: leave it out")
        if self.quantization in AT_LOAD and self.row not in ("model", "parallel"):
            raise ValueError(f"quantization={self.quantization!r} goes with a draft model: leave it out")
        return self

    @property
    def row(self) -> str:
        """Name of the drafter in the registry."""
        method = self.method or _method_of(self.model or "")
        row = MTP if method.endswith(MTP) else DRAFTERS[method]
        return IN_PARALLEL.get(row, row) if self.parallel_drafting else row


def _method_of(model: str) -> str:
    """Returns the method that the name of a checkpoint implies."""
    name = model.lower().replace("-", "")
    return next((method for method in NAMED_AFTER_METHOD if method in name), "draft_model")
