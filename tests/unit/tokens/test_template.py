"""tokens.template: what templates may do, what they may not, and that none does it for long."""

from __future__ import annotations

import datetime

import pytest
from llama_cpp import llama_chat_format

from antiphon.core.errors import BadRequest
from antiphon.tokens.template import ChatMessage, ChatTemplate
from antiphon.tokens.textmodel import CHATML

CHAT = [ChatMessage("system", "Be brief."), ChatMessage("user", " Hi "), ChatMessage("assistant", "Hello")]


def render(source: str, messages: list[ChatMessage] | None = None) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(CHAT if messages is None else messages)


def refusal(source: str) -> str:
    """What the client reads when this template is loaded and run."""
    with pytest.raises(BadRequest) as caught:
        render(source)
    return caught.value.message


def test_chatml() -> None:
    """The default template ends where the assistant's answer begins."""
    assert render(CHATML, CHAT[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        llama_chat_format.CHATML_CHAT_TEMPLATE,
        llama_chat_format.MISTRAL_INSTRUCT_CHAT_TEMPLATE,
        llama_chat_format.MIXTRAL_INSTRUCT_CHAT_TEMPLATE,
        llama_chat_format.LLAMA3_INSTRUCT_CHAT_TEMPLATE,
    ],
    ids=["ours", "chatml", "mistral", "mixtral", "llama3"],
)
def test_known_templates_render_as_llama_cpp_renders_them(source: str) -> None:
    """The guards change no output: the same text as llama-cpp-python's own formatter."""
    chat = [ChatMessage("user", " a <b> & 'c' "), ChatMessage("assistant", "d"), ChatMessage("user", "e\n")]
    formatter = llama_chat_format.Jinja2ChatFormatter(source, eos_token="</s>", bos_token="<s>")
    messages = [{"role": message.role, "content": message.content} for message in chat]
    assert render(source, chat) == formatter(messages=messages).prompt


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}{{ loop.index ~ m.role[0] }}{{ ',' if not loop.last }}{% endfor %}",
            "1s,2u,3a",
        ),
        (
            "{% for m in messages[1:] if m.role == 'user' %}{{ m.content | trim ~ loop.length }}{% endfor %}",
            "Hi1",
        ),
        (
            "{% set a = namespace(n=0) %}{% for m in messages %}{% set a.n = a.n + 1 %}{% endfor %}{{ a.n }}",
            "3",
        ),
        ("{% macro say(m) %}[{{ m.role ~ '|' ~ m.name }}]{% endmacro %}{{ say(messages[0]) }}", "[system|]"),
        (
            "{% for m in messages %}{{ m.role }}{% if loop.first %}{% break %}{% endif %}{% endfor %}",
            "system",
        ),
        ("{{ messages | map(attribute='role') | join(',') }}", "system,user,assistant"),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | list | length) }}", "1"),
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be brief."}'),
        ("{{ {'a': '<ä>'} | tojson(indent=1) }}", '{\n "a": "<ä>"\n}'),
        ("{% generation %}{{ messages[-1].content }}{% endgeneration %}", "Hello"),
        ("{{ messages[0].content.split(' ')[-1].rstrip('.') }}", "brief"),
        ("{{ 'yes' if tools is none and add_generation_prompt and x is not defined }}", "yes"),
        ("{{ '{}-{}'.format('a', [1]) }}", "a-[1]"),
        ("{{ bos_token + '%s-%d' % ('a', 1) + eos_token }}", "<s>a-1</s>"),
        ("{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}", "abab10243[1, 2]"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(1, true) }}", "a\n  b| a\n b"),
        (
            "{{ 'aXa' | replace('a', 'b') }}{{ 'aa'.replace('a', 'b', 1) }}{{ '-'.join(['x', 'y']) }}",
            "bXbbax-y",
        ),
        ("{% if true %}\n  x\n{% endif %}\ny", "  x\ny"),
        ("{{ '<b>' | safe }}{{ none }}{{ undefined_name }}", "<b>None"),
        ("{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}", "123"),
        ("{{ messages[0].name is defined }}{{ messages[0].get('name', '-') }}", "False-"),
    ],
)
def test_what_templates_use_works(source: str, expected: str) -> None:
    """Loops, macros, namespaces, filters and methods that chat templates in use are made of."""
    assert render(source) == expected


def test_a_name_reaches_the_template() -> None:
    """`name` is there for messages that have one."""
    assert render("{{ messages[0].name }}", [ChatMessage("user", "x", name="Ada")]) == "Ada"


def test_the_template_knows_the_date() -> None:
    """Templates that state today's date get it."""
    assert render("{{ strftime_now('%Y') }}") >= str(datetime.datetime.now().year - 1)


def test_the_templates_own_words_reach_the_client() -> None:
    """A template that refuses the messages says why, and the field is named."""
    with pytest.raises(BadRequest, match="Roles must alternate!") as caught:
        render("{{ raise_exception('Roles must alternate!') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ (''['__class__']).__base__ }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0.__class__}'.format_map({}) }}",
        "{{ range.__globals__.x }}",
        "{{ raise_exception.__globals__['__builtins__'].open }}",
        "{{ self._TemplateReference__context.environment }}",
        "{% for x in [1] %}{{ loop._recurse.__globals__.x }}{% endfor %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(a=1).__class__.__mro__ }}",
        "{{ [1] | map(attribute='__class__.__mro__') | first + 1 }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{% set messages.x = 1 %}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "{% autoescape true %}<{% endautoescape %}",
    ],
)
def test_templates_reach_nothing_outside(source: str) -> None:
    """Ways out of the sandbox (CVE-2024-34359 and its kin) end in a refusal."""
    assert "chat template" in refusal(source)


DOUBLING = (
    "{% set ns = namespace(x=START) %}{% for i in range(64) %}{% set ns.x = STEP %}{% endfor %}{{ END }}"
)


def doubling(start: str, step: str, end: str = "ns.x") -> str:
    return DOUBLING.replace("START", start).replace("STEP", step).replace("END", end)


@pytest.mark.parametrize(
    "source",
    [
        # Loops: nested, empty inside, in a macro that calls itself twice, in a recursive loop.
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
        "{% for x in [1] * 9 recursive %}{% if loop.depth < 40 %}{{ loop([1] * 9) }}{% endif %}{% endfor %}",
        # One operation that would make much.
        "{{ 'x' * 300000000 }}",
        "{{ 300000000 * 'x' }}",
        "{{ ([1] * 300000000) | length }}",
        "{{ '%0300000000d' % 1 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 2 ** -100000000000 }}",
        "{{ 'a\n' | indent(10 ** 9) }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ [1, 2] | tojson(separators=('x' * 1000000, ':')) }}",
        "{% set a = 'x' * 1000000 %}{{ a.join(a) }}",
        "{% set a = 'x' * 1000000 %}{{ range(99999) | join(a) }}",
        "{% set a = 'x' * 1000000 %}{{ a.replace('', a) }}",
        "{% set a = 'x' * 1000000 %}{{ a | replace('x', a) }}",
        "{% set a = 'x' * 1000000 %}{% set b | replace('y', a) %}{{ 'y' * 9000 }}{% endset %}",
        # Small steps that double.
        doubling("'xx'", "ns.x + ns.x"),
        doubling("'xx'", "ns.x ~ ns.x"),
        doubling("'xx'", "[ns.x, ns.x] | join"),
        doubling("'xx'", "'%s%s' % (ns.x, ns.x)"),
        doubling("[1]", "ns.x + ns.x", "ns.x | length"),
        doubling("[1]", "[ns.x, ns.x]"),
        doubling("[1]", "[ns.x, ns.x]", "ns.x == ns.x"),
        doubling("(1,)", "(ns.x, ns.x)", "{ns.x: 1}[ns.x]"),
        doubling("{}", "{'a': ns.x, 'b': ns.x}", "ns.x | tojson"),
        doubling("{}", "dict(a=ns.x, b=ns.x)", "ns.x | string"),
        doubling("9", "ns.x * ns.x"),
        "{% set x = 'xx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 64 + "{{ x }}",
        # Cheap-looking work over a long text, over and over.
        *(
            "{% set a = 'x' * 1000000 %}{% set b = a + '' %}{% for i in range(99999) %}"
            + body
            + "{% endfor %}"
            for body in (
                "{% if a == b %}{% endif %}",
                "{% if a is eq b %}{% endif %}",
                "{% if 'y' in a %}{% endif %}",
                "{% set c = a[1:] %}",
                "{% set c = a.lower() %}",
                "{% set c = a | upper %}",
                "{% filter trim %}{{ a }}{% endfilter %}",
            )
        ),
        "{% for i in range(99999) %}{% set c = range(99999) | list %}{% endfor %}",
        "{% for i in range(99999) %}" + "y" * 100000 + "{% endfor %}",
        "{% macro f() %}"
        + "y" * 100000
        + "{% endmacro %}{% for i in range(99999) %}{% set c = f() %}{% endfor %}",
    ],
)
def test_no_template_does_much_work(source: str) -> None:
    """Work without end, by iterations or by size, is stopped by the budget before it is done (A13)."""
    assert "was stopped" in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ 'x'.center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ 'x'.zfill(10 ** 9) }}",
        "{{ '\t'.expandtabs(10 ** 9) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ strftime_now('%0999999999d') }}",
        "{{ range(10 ** 9) }}",
        "{{ 1.5 | round(10 ** 9) }}",
        "{{ 1 / 0 }}",
        "{{ 10.0 ** 400 }}",
        "{{ missing.attribute.deeper }}",
        "{{ messages[0].items() }}",
        "{{ {[]: 1} }}",
        "{% for x in none %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(source: str) -> None:
    """Whatever goes wrong inside, the client reads what, and no other exception comes out."""
    assert refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{% for x in messages %}",
        "{{ 1 | no_such_filter }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "not " * 3000 + "1 }}",
        "{{ " + "9" * 5000 + " }}",
        "{% for a in [1] %}" * 100 + "{% endfor %}" * 100,
        "{% if 1 %}" + "{% elif 1 %}" * 3000 + "{% endif %}",
        "x" * (1 << 19),
    ],
    ids=range(9),
)
def test_a_broken_template_is_refused_at_load(source: str) -> None:
    """What does not compile, for its syntax or its size, is known before any message comes."""
    with pytest.raises(BadRequest, match="chat template"):
        ChatTemplate(source, bos="", eos="")


def test_a_syntax_error_names_its_line() -> None:
    """Whoever mends the template reads where."""
    with pytest.raises(BadRequest, match="line 3"):
        ChatTemplate("a\nb\n{% for %}", bos="", eos="")


def test_nothing_runs_at_load() -> None:
    """Constant expressions wait for a budget: loading a template does not compute them."""
    template = ChatTemplate(
        "{% if false %}{{ 'x' * 10 ** 12 }}{{ 9 ** 9 ** 9 }}{% endif %}ok", bos="", eos=""
    )
    assert template.render([]) == "ok"


def test_long_chats_have_room() -> None:
    """The budget grows with the messages: a chat of 5000 turns and a text of 4 MB both render."""
    turns = [ChatMessage("user", "x" * 100)] * 5000
    assert render(CHATML, turns).count("<|im_start|>user") == 5000
    assert len(render(CHATML, [ChatMessage("user", "x" * (1 << 22))])) > 1 << 22


def test_each_render_has_its_own_budget() -> None:
    """Work of one request is not paid by the next."""
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}ok", bos="", eos="")
    assert [template.render([]) for _ in range(3)] == ["ok"] * 3
