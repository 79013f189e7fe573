"""A model as the gateway knows it: its vocabulary, its prompts and its context, without weights.

Owns nothing but the way from a catalogue entry to a `TextModel`. A model whose file brings no chat
template gets ChatML, the most common one; where its vocabulary lacks ChatML's control tokens they
are plain text to it, which every model reads after a fashion.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import BadRequest
from antiphon.tokens.bytelevel import ByteTokenizer
from antiphon.tokens.gguf import GgufTokenizer
from antiphon.tokens.modelfile import GgufMetadata, context_of, locate, read_metadata
from antiphon.tokens.prompt import PromptBuilder
from antiphon.tokens.template import ChatTemplate
from antiphon.tokens.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TextModel:
    """What tokenising for a model needs. `context_tokens`: most tokens of prompt and answer together."""

    name: str
    tokenizer: Tokenizer
    prompts: PromptBuilder
    context_tokens: int


def load_text_model(entry: ModelEntry) -> TextModel:
    """Load an entry's vocabulary and chat template, never its weights. Raises BadRequest."""
    path = locate(entry)
    context_tokens = context_of(entry)
    if path is None:
        tokenizer = ByteTokenizer()
        template = ChatTemplate(CHATML, bos="", eos=tokenizer.name(tokenizer.end_ids[0]))
        return TextModel(entry.name, tokenizer, PromptBuilder(tokenizer, template), context_tokens)
    metadata = read_metadata(path)
    vocabulary = GgufTokenizer(path)
    try:
        template = _template(metadata, vocabulary)
    except BadRequest:
        vocabulary.close()
        raise
    return TextModel(entry.name, vocabulary, PromptBuilder(vocabulary, template), context_tokens)


def _template(metadata: GgufMetadata, tokenizer: GgufTokenizer) -> ChatTemplate:
    def spelling(token_id: int | None) -> str:
        return tokenizer.name(token_id) if token_id is not None and token_id < tokenizer.vocab_size else ""

    return ChatTemplate(
        metadata.chat_template or CHATML, bos=spelling(metadata.bos_id), eos=spelling(metadata.eos_id)
    )
