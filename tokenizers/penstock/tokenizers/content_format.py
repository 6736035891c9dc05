"""Whether a chat template takes a message's content as one string or as a list of parts."""

from __future__ import annotations

from typing import Literal

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError

from .environment import ChatEnvironment
from .errors import ChatTemplateError

ContentFormat = Literal["string", "openai"]


def content_format(source: str) -> ContentFormat:
    """`openai` when the template loops over a message's `content`, directly or by way of variables and macros.

    Raises ChatTemplateError when `source` is not valid Jinja.
    """
    try:
        tree = ChatEnvironment().parse(source)
    except TemplateSyntaxError as error:
        message = f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        raise ChatTemplateError(message) from None
    except RecursionError:
        raise ChatTemplateError("the chat template is nested too deeply") from None
    names = _names_of_content(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables that are assigned a message's content, and macro parameters that receive it."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        more = set(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                more.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            for parameter, argument in zip(macro.args if macro else (), call.args, strict=False):
                if _is_content(argument, names):
                    more.add(parameter.name)
        if more == names:
            return names
        names = more


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner, names)
        case nodes.Filter(node=inner) if inner is not None:
            return _is_content(inner, names)
        case nodes.CondExpr(expr1=first, expr2=second):
            return _is_content(first, names) or (second is not None and _is_content(second, names))
    return False
