"""Endpoints that load and unload LoRA adapters of the target, with the names and fields of vLLM."""

from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import Field
from starlette.requests import Request as HttpRequest

from gateway.api.bodies import Entrance
from gateway.api.openai.bodies import parsed
from gateway.api.openai.field_types import NullIsLeftOut, Text
from gateway.generation.generation import Generation

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Path = Annotated[Text, Field(min_length=1)]


class LoadAdapterRequest(NullIsLeftOut):
    lora_name: Text
    lora_path: Path
    load_inplace: bool = False


class UnloadAdapterRequest(NullIsLeftOut):
    lora_name: Text


def add_adapters(app: FastAPI, generation: Generation, is_known: Any, entrance: Entrance) -> None:
    """Adds the endpoints. is_known: dependency that refuses callers without access."""
    unknown = generation.settings.unknown_fields

    @app.post(LOAD_ADAPTER, dependencies=[Depends(is_known)])
    async def load_adapter(request: HttpRequest) -> PlainTextResponse:
        """Loads an adapter at every target, for all later requests."""
        async with entrance.body(request) as came:
            body = (await parsed(LoadAdapterRequest, came.text, unknown)).body
            await generation.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post(UNLOAD_ADAPTER, dependencies=[Depends(is_known)])
    async def unload_adapter(request: HttpRequest) -> PlainTextResponse:
        """Withdraws an adapter from later requests, and drops it once its last request has ended."""
        async with entrance.body(request) as came:
            body = (await parsed(UnloadAdapterRequest, came.text, unknown)).body
            await generation.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
