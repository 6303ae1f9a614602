"""What instructor is used for: answers as objects, by calls and by schemas."""

import sys
from importlib.metadata import version

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Age(BaseModel):
    """Age of a person in years."""

    model_config = ConfigDict(extra="forbid")

    age: int = Field(ge=0, le=120)


def main(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        told = instructor.from_openai(client, mode=mode).chat.completions.create(
            model="m",
            response_model=Age,
            messages=[{"role": "user", "content": "How old is she?"}],
            max_tokens=60,
            temperature=0,
            max_retries=0,
        )
        assert isinstance(told, Age), mode
    print(version("instructor"))


if __name__ == "__main__":
    main(sys.argv[1])
