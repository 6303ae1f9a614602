"""OpenAI's HTTP API: completions, chat completions and responses."""
