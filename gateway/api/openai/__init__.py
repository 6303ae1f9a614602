"""The HTTP API in the forms of OpenAI: completions, chat completions and responses."""
