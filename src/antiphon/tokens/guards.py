"""Rewrites a chat template's syntax tree so that its work passes guards.

Owns where the guards stand: around what a loop iterates over, each piece of text written or
joined by `~`, each side of a comparison, slices, subscripts and literals of lists, tuples and
mappings. A guard is a filter that takes Jinja's context (so nothing can fold it at compile time)
under a name that no template can spell. What the guards do is `sandbox`'s business.
"""

from __future__ import annotations

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

COUNT = "count!"  # what a loop iterates over
TEXT = "text!"  # what becomes text
WEIGH = "weigh!"  # what is compared or hashed in whole
COPY = "copy!"  # what a slice has made

_REFUSED = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.EvalContextModifier,  # {% autoescape %}
    nodes.ScopedEvalContextModifier,
)


def add_guards(tree: nodes.Template) -> nodes.Template:
    """Put the guards in; changes the tree.

    Raises jinja2.TemplateSyntaxError for statements that cannot be guarded.
    """
    for refused in tree.find_all(_REFUSED):
        raise jinja2.TemplateSyntaxError(
            f"{type(refused).__name__} has no place in a chat template", refused.lineno
        )
    guarded: nodes.Template = _Guarding().visit(tree)
    return guarded


class _Guarding(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _guard(COUNT, node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_guard(TEXT, child) for child in node.nodes]
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_guard(TEXT, child) for child in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _weigh(node.expr)
        for operand in node.ops:
            operand.expr = _weigh(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _guard(COPY, node)
        node.arg = _weigh(node.arg)  # hashing a tuple of tuples takes all of it
        return node

    # A list of the same list twice, twenty levels deep, has a million elements: literals are weighed as made.

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _weigh(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _weigh(node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _weigh(pair.key)
        return _weigh(node)


def _guard(name: str, node: nodes.Node) -> nodes.Filter:
    no_arguments: list[nodes.Node] = []
    return nodes.Filter(node, name, no_arguments, no_arguments, None, None, lineno=node.lineno)


def _weigh(node: nodes.Expr) -> nodes.Expr:
    is_weighed = isinstance(node, nodes.Filter) and node.name == WEIGH
    return node if is_weighed or isinstance(node, nodes.Const) else _guard(WEIGH, node)
