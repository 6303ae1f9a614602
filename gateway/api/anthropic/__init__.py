"""Anthropic's Messages API, which agents such as Claude Code speak: each request becomes a chat."""
