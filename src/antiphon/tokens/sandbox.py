"""A Jinja environment in which a chat template can do only so much.

Templates come with model files, so they are somebody else's programs. Jinja's own sandbox keeps
them from reaching Python; this one also bounds their work: the guards of `guards` and everything
else that repeats, grows or compares spend from the render's `Budget`, which travels in the context.
Filters, tests, methods and globals are allow-lists. Does not know chats or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from antiphon.tokens import guards
from antiphon.tokens.budget import Budget, OverBudget

BUDGET = "budget!"  # a context variable whose name no template can spell

_MAX_INDENT = 64
_PLAIN_FORMAT = re.compile(r"(?:[^%]|%[sd%])*")
_PLAIN_FIELDS = re.compile(r"(?:[^{}]|\{\})*")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_METHODS = {
    str: _words(
        """capitalize count endswith find format index isalnum isalpha isdigit islower isspace isupper join
        lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
        splitlines startswith strip title upper"""
    ),
    dict: _words("get items keys values"),
    list: _words("count index"),
    tuple: _words("count index"),
    LoopContext: _words(
        """changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0"""
    ),
}
# Filters that look at their input's elements once, and filters that take in elements of elements.
_SHALLOW_FILTERS = _words(
    "abs count d default first items last length list map reject rejectattr reverse select selectattr"
)
_DEEP_FILTERS = _words("capitalize dictsort float int lower string title trim upper")
_PLAIN_TESTS = _words(
    """boolean callable defined divisibleby even false float integer iterable mapping none number odd sameas
    sequence string true undefined"""
)
_COMPARING_TESTS = _words("eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. Renders share it; each brings its budget in its variables, under `BUDGET`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Optimizing would run a template's operators and filters at load, without a budget.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _GenerationTag]
        )
        plain = jinja2.Environment()
        self.globals = {"dict": dict, "namespace": _Namespace, "range": self.globals["range"]}
        self.filters = {
            **{name: _filter(plain, name, Budget.weigh_surface) for name in _SHALLOW_FILTERS},
            **{name: _filter(plain, name, Budget.weigh) for name in _DEEP_FILTERS},
            **{"indent": _indent, "join": _join, "replace": _replace, "safe": _safe, "tojson": _to_json},
            **{guards.COUNT: _Counted, guards.TEXT: _text, guards.WEIGH: _weigh, guards.COPY: _copy},
        }
        self.tests = {
            **{name: self.tests[name] for name in _PLAIN_TESTS},
            **{name: _comparing_test(plain, name) for name in _COMPARING_TESTS},
        }

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile with the guards in place. Raises jinja2.TemplateError."""
        tree = guards.add_guards(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS.items())

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would tame `str.format` when it is looked up; here `call` lets plain `{}` through."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, LoopContext) and args:  # a recursive loop goes down a level
            args = (_Counted(context, args[0]), *args[1:])
        elif isinstance(owner, str | dict | list | tuple):
            _spend_on_method(budget, owner, obj.__name__, [*args, *kwargs.values()])
        result = super().call(context, obj, *args, **kwargs)
        budget.weigh_surface(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "+":
            budget.weigh_surface(left)
            budget.weigh_surface(right)
        elif operator == "*":
            budget.spend_multiplying(left, right)
        elif operator == "**":
            budget.spend_raising(left, right)
        elif isinstance(left, str):
            if not _PLAIN_FORMAT.fullmatch(left):
                raise OverBudget("it formats text with more than plain %s and %d")
            budget.weigh((left, right))
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}` marks what to train on; for rendering it is transparent."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Holds variables across scopes. Prints flat: namespaces of namespaces could print without end."""

    def __repr__(self) -> str:
        return "<namespace>"


@pass_context
class _Counted:
    """The items of a loop, one step each."""

    __slots__ = ("_budget", "_items")

    def __init__(self, context: Context, items: Any) -> None:
        self._items = items
        self._budget = _budget(context)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.spend()
            yield item

    def __len__(self) -> int:
        return len(self._items)


def _budget(context: Context) -> Budget:
    budget: Budget = context.parent[BUDGET]
    return budget


def _spend_on_method(budget: Budget, owner: object, name: str, arguments: list[Any]) -> None:
    budget.weigh_surface(owner)
    budget.weigh(arguments)
    if isinstance(owner, str) and name == "replace":
        budget.spend_replacing(owner, *arguments[:2])
    elif isinstance(owner, str) and name == "join":
        budget.spend_joining(owner, list(*arguments))
    elif isinstance(owner, str) and name == "format" and not _PLAIN_FIELDS.fullmatch(owner):
        raise OverBudget("it formats text with more than plain {}")


def _filter(
    plain: jinja2.Environment, name: str, weigh: Callable[[Budget, object], None]
) -> Callable[..., Any]:
    """Jinja's own filter behind the budget. What it yields lazily is made at once, element by element."""

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        weigh(budget, value)
        result = plain.call_filter(name, value, args, kwargs, context=context)
        if isinstance(result, Iterator):
            return list(_Counted(context, result))
        budget.weigh_surface(result)
        return result

    return guarded


def _comparing_test(plain: jinja2.Environment, name: str) -> Callable[..., Any]:
    @pass_context
    def guarded(context: Context, value: Any, other: Any) -> Any:
        _budget(context).weigh((value, other))
        return plain.call_test(name, value, (other,))

    return guarded


@pass_context
def _text(context: Context, value: Any) -> str:
    """What is written becomes text here. Objects without a text of their own are not printed."""
    _budget(context).weigh(value)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | list | tuple | dict | jinja2.Undefined | None):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no text")


@pass_context
def _weigh(context: Context, value: Any) -> Any:
    _budget(context).weigh(value)
    return value


@pass_context
def _copy(context: Context, value: Any) -> Any:
    _budget(context).weigh_surface(value)
    return value


@pass_context
def _join(context: Context, value: Any, d: str = "") -> str:
    items = [_text(context, item) for item in value]
    _budget(context).spend_joining(d, items)
    return d.join(items)


@pass_context
def _replace(context: Context, s: Any, old: str, new: str, count: int = -1) -> str:
    text = _text(context, s)
    _budget(context).spend_replacing(text, old, new)
    return text.replace(old, new, count)


@pass_context
def _indent(context: Context, s: Any, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not 0 <= width <= _MAX_INDENT:
        raise OverBudget(f"it indents by {width} characters")
    text = _text(context, s)
    _budget(context).spend((text.count("\n") + 1) * (width + 1))
    lines = text.split("\n")
    padded = [line if not line and not blank else " " * width + line for line in lines]
    if not first:
        padded[0] = lines[0]
    return "\n".join(padded)


@pass_context
def _safe(context: Context, value: Any) -> str:
    """Nothing is escaped here, so nothing need be exempt."""
    return _text(context, value)


@pass_context
def _to_json(
    context: Context,
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    sort_keys: bool = False,
    separators: tuple[str, str] | None = None,
) -> str:
    """JSON without HTML escapes, as transformers renders it."""
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise OverBudget(f"it indents by {indent} characters")
    if separators is not None and sum(map(len, separators)) > _MAX_INDENT:
        raise OverBudget("its JSON separators are too long")
    encoder = json.JSONEncoder(
        indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys, separators=separators
    )
    budget = _budget(context)
    pieces: list[str] = []
    for piece in encoder.iterencode(value):  # piece by piece: indents grow with depth times elements
        budget.spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)
