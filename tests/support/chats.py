"""Rendered chats, for a byte tokenizer with a few marks."""

from tokenizers import AddedToken, Tokenizer

from gateway.api.openai.chat_template import ChatTemplate
from gateway.api.openai.messages import Message
from gateway.api.openai.rendering import ChatPrompts
from tests.fakes.tokenizers import byte_tokenizer

END, TURN, TAG, SPACES = "<|end|>", "<|turn|>", "<h1>", "    "
CHATML = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


def marked_tokenizer() -> Tokenizer:
    """Returns a byte tokenizer with a special mark, marks that are not special, and added plain text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (TURN, TAG, SPACES)])
    return tokenizer


def prompts_of(source: str, *, tokenizer: Tokenizer | None = None, **settings) -> ChatPrompts:
    added = (tokenizer or marked_tokenizer()).get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    ids = {token.content: token_id for token_id, token in added.items()}
    return ChatPrompts(ChatTemplate(source, {}, **settings.pop("template", {})), special, ids, **settings)


def messages_of(*messages: dict | str) -> list[Message]:
    """Returns messages; a string is the content of a user's message."""
    given = [
        {"role": "user", "content": message} if isinstance(message, str) else message for message in messages
    ]
    return [Message.model_validate(message) for message in given]


async def told(source: str, *messages: dict | str, prompts: ChatPrompts | None = None, **chat) -> str:
    rendered = await (prompts or prompts_of(source)).rendered(messages_of(*messages), **chat)
    return "".join(rendered.pieces)
