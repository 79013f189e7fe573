"""tokens.prompt: user text is text, whatever it spells and whatever the template does with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.tokens.bytelevel import IM_END, IM_START, ByteTokenizer
from antiphon.tokens.prompt import PromptBuilder
from antiphon.tokens.template import ChatMessage, ChatTemplate

# Each frames every message in one start and one end token of its own.
TREATMENTS = [
    "{{ m.content }}",
    "{{ m.content | trim }}",
    "{{ m.content ~ m.content }}",
    "{{ m.content.split('~') | join }}",
    "{{ m.content.strip().replace('~', '') + '|>' }}",
    "<|{{ m.content }}",
    "{{ m.name }}{{ m.content }}",
    "{{ m.content | lower }}",
    "{{ (messages | map(attribute='content') | join) }}",
]
# Look into the text, so that marks may change what they find; they open no hole all the same.
INSPECTIONS = [
    "{{ m.content.split('</think>')[-1] }}",
    "{{ m.content.split('<|')[0] ~ m.content.split('|>')[-1] }}",
    "{{ m.content[3:] }}",
    "{{ m.content | replace('<', '<|') }}",
    "{% if m.content.startswith('<') %}{{ m.content[1:] }}{% else %}{{ m.content }}{% endif %}",
    "{{ m.content | tojson(ensure_ascii=true) }}",
    "{% for c in m.content %}{{ c }}{% endfor %}",
]

SPELLED = [
    "<|im_start|>",
    "<|im_end|>",
    "<|IM_END|>",
    "<|im_",
    "end|>",
    "im_start|>",
    "<|",
    "|>",
    "<",
    "|",
    "_",
]
OTHER = ["im", "~", "</think>", " ", "\n", "a", "é", "🙂", "\ue000", "\ue001", "\u00a0"]
fragments = st.sampled_from([*SPELLED, *OTHER])
texts = st.lists(fragments, max_size=10).map("".join)
messages = st.lists(
    st.builds(ChatMessage, role=st.sampled_from(["user", "assistant"]), content=texts, name=texts),
    min_size=1,
    max_size=4,
)


def framed(treatment: str) -> ChatTemplate:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + treatment + "<|im_end|>\n{% endfor %}"
    return ChatTemplate(source, bos="", eos="")


def control_ids(ids: list[int]) -> list[int]:
    return [i for i in ids if i in (IM_START, IM_END)]


@given(chat=messages, treatment=st.sampled_from(TREATMENTS))
def test_ids_spell_the_rendered_chat_and_only_the_template_frames_it(
    chat: list[ChatMessage], treatment: str
) -> None:
    """The ids decode to the plain rendering; its control ids are the template's, one frame a message."""
    tokenizer, template = ByteTokenizer(), framed(treatment)
    ids = PromptBuilder(tokenizer, template).chat(chat)
    text = b"".join(tokenizer.piece(i) or tokenizer.name(i).encode() for i in ids).decode()
    assert text == template.render(chat)
    assert control_ids(ids) == [IM_START, IM_END] * len(chat)


@given(chat=messages, treatment=st.sampled_from(INSPECTIONS))
def test_templates_that_look_into_texts_cannot_be_fooled(chat: list[ChatMessage], treatment: str) -> None:
    """Cutting texts at what they spell never yields a control id of the user's making."""
    ids = PromptBuilder(ByteTokenizer(), framed(treatment)).chat(chat)
    assert control_ids(ids) == [IM_START, IM_END] * len(chat)


@given(chat=messages)
def test_marks_leave_no_trace(chat: list[ChatMessage]) -> None:
    """Every character of the prompt stands in the plain rendering: no mark gets to the model."""
    tokenizer, template = ByteTokenizer(), framed("{{ m.content }}")
    ids = PromptBuilder(tokenizer, template).chat(chat)
    text = b"".join(map(tokenizer.piece, ids)).decode()
    assert set(text) <= set(template.render(chat))


@given(text=texts)
def test_bare_text_never_holds_control_ids(text: str) -> None:
    """A completion's prompt is encoded as it is."""
    tokenizer = ByteTokenizer()
    ids = PromptBuilder(tokenizer, framed("")).text(text)
    assert bytes(ids).decode() == text
