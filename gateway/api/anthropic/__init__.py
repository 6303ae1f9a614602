"""Anthropic's Messages API, which agents such as Claude Code use: each request is translated to a chat."""
