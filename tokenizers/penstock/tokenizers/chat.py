"""Chat templates: messages to the prompt text that the model was trained on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from jinja2 import Template, meta, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from .environment import DEFAULT_OUTPUT_LIMIT, Buffer, ChatEnvironment, TemplateBounds, TooLarge, set_current_bounds
from .errors import ChatTemplateError
from .files import SPECIAL_TOKEN_NAMES
from .messages import NO_NEEDS, ContentFormat, TemplateNeeds, content_format, normalize_messages
from .render_threads import RenderThreads
from .template_probe import find_needs, writes_any_role

DENIED_KWARGS = frozenset(
    (
        *("chat_template", "tokenize", "tokenizer", "conversation", "conversations", "messages", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("processor_kwargs", "load_audio_from_video", "self", "context", "environment"),
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner"),
        *SPECIAL_TOKEN_NAMES,
    )
)
"""Names a request's `chat_template_kwargs` must not set: they would change what renders, not how."""

COMPILE_TIME_LIMIT = 30.0
PROBE_TIME_LIMIT = 5.0
"""A probe takes milliseconds. A template that needs longer for a few words cannot be served anyway."""
_PROBE_OUTPUT_LIMIT = 1 << 20
ANY_ROLE = "*"
_COMMON_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_THREADS = RenderThreads()


class ChatTemplate:
    """A compiled template. `special_tokens` are variables of the template, by role (`bos_token`, ...).
    `content_format` is how it takes content; None: as its loops tell. `tool_use` and `rag` are sources of the model's
    templates for chats with tools and with documents, where it has such. `only_with_tools`: this is the former one.

    Raises ChatTemplateError when a source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        content_format: ContentFormat | None = None,
        *,
        tool_use: str | None = None,
        rag: str | None = None,
        only_with_tools: bool = False,
    ) -> None:
        self.source = source
        self._given_format = content_format
        self._special_tokens = dict(special_tokens or {})
        self._template: Template
        self.content_format: ContentFormat
        self._own_variables: frozenset[str]
        self._own_roles: frozenset[str]
        # Constant expressions are evaluated while compiling, so that is done within bounds too.
        _run(self._compile, COMPILE_TIME_LIMIT, DEFAULT_OUTPUT_LIMIT)
        self._only_with_tools = only_with_tools
        self._tool_use = self._rag = None
        if tool_use is not None:
            self._tool_use = ChatTemplate(tool_use, special_tokens, content_format, only_with_tools=True)
        if rag is not None:
            self._rag = ChatTemplate(rag, special_tokens, content_format)

    def _compile(self) -> None:
        environment = ChatEnvironment()
        self._template = environment.from_string(self.source)
        self.content_format = self._given_format or content_format(self.source)
        tree = environment.parse(self.source)
        self._own_roles = _roles(tree)  # first: the next line folds constants in the tree
        self._own_variables = frozenset(meta.find_undeclared_variables(tree))

    @property
    def with_tools(self) -> ChatTemplate:
        """The template of chats with tools; most models have one for all chats."""
        return self._tool_use or self

    @property
    def by_name(self) -> dict[str, ChatTemplate]:
        """Itself as `default`, and `tool_use` and `rag` where the model has such."""
        named = {"default": self, "tool_use": self._tool_use, "rag": self._rag}
        return {name: template for name, template in named.items() if template is not None}

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that any of them reads without setting them first."""
        return frozenset().union(*(template._own_variables for template in self.by_name.values()))

    @cached_property
    def roles(self) -> frozenset[str]:
        """Roles of messages that it reads beside those of OpenAI's API, such as Granite's `document`; and ANY_ROLE
        where it writes whatever role a message has. To be read first when `needs` is."""
        own = [
            template._own_roles | ({ANY_ROLE} if template._probed[1] else set()) for template in self.by_name.values()
        ]
        return frozenset().union(*own)

    def choose(
        self, tools: Sequence[Mapping[str, Any]] | None, documents: Sequence[Mapping[str, Any]] | None
    ) -> ChatTemplate:
        """The one for a chat with these. Raises ChatTemplateError for documents that it would leave out."""
        if not tools and not documents:
            return self
        chosen = self.with_tools if tools else self._rag or self
        if documents and "documents" not in chosen._own_variables and "documents" in self.variables:
            raise ChatTemplateError("documents: the model's chat template for tools does not use documents")
        return chosen

    @property
    def needs(self) -> TemplateNeeds:
        """Found by rendering some short conversations when it is first read, which should be before any request.
        Blocks for milliseconds, and for up to PROBE_TIME_LIMIT if the template is slow: then it has none."""
        return self._probed[0]

    @cached_property
    def _probed(self) -> tuple[TemplateNeeds, bool]:
        """`needs`, and whether it writes whatever role a message has."""
        probes = [(NO_NEEDS, False)]

        def work() -> None:
            form, with_tools = self.content_format, self._only_with_tools
            needs = find_needs(
                self._write,
                form,
                fixed_format=self._given_format is not None,
                shows_calls="tool_calls" in self.source,
                with_tools=with_tools,
            )
            probes.append((needs, writes_any_role(self._write, form, needs, with_tools=with_tools)))

        with suppress(ChatTemplateError):  # it is too slow
            _run(work, PROBE_TIME_LIMIT, _PROBE_OUTPUT_LIMIT)
        return probes[-1]

    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """In the thread of `_run`."""
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        return self._generate({**self._special_tokens, **variables}, _PROBE_OUTPUT_LIMIT)

    def normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`normalize_messages` in the form that this template needs."""
        return normalize_messages(messages, self.content_format, self.needs)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        time_limit: float = 30.0,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> str:
        """The prompt. Blocks for up to `time_limit` seconds and a second more; call it off the event loop.

        `extra` are further variables, as requests supply them. `output_limit` is in characters. Raises
        ChatTemplateError, and ChatTemplateTimeout when time is up.
        """
        check_kwargs(extra or {})
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        names = {**(extra or {}), "messages": messages, "tools": tools, "documents": documents}
        variables: dict[str, Any] = {
            **self._special_tokens,
            **_plain_variables(names),
            "add_generation_prompt": add_generation_prompt,
        }
        mark = _mark_final_message(variables["messages"]) if continue_final_message else None
        text = self._render(variables, time_limit, output_limit)
        return text if mark is None else _cut_at(mark, text)

    def _render(self, variables: dict[str, Any], time_limit: float, output_limit: int) -> str:
        pieces: list[str] = []

        def work() -> None:
            pieces.append(self._generate(variables, output_limit))

        _run(work, time_limit, output_limit)
        return pieces[0]

    def _generate(self, variables: dict[str, Any], output_limit: int) -> str:
        buffer = Buffer(TemplateBounds(output_limit))
        buffer.extend(self._template.generate(variables))
        return "".join(buffer)


def _roles(tree: nodes.Template) -> frozenset[str]:
    """Those that a template compares a message's role with. One that writes whatever role it gets reads none by that.
    What it takes for a system message is left out: those have a place and a form of their own (`normalize_messages`).
    """
    roles: set[str] = set()
    for compared in tree.find_all(nodes.Compare):
        sides = [compared.expr, *(operand.expr for operand in compared.ops)]
        if any(map(_is_role, sides)):
            names = {const.value for side in sides for const in _constants(side) if isinstance(const.value, str)}
            roles |= names if "system" not in names else set()
    return frozenset(roles - _COMMON_ROLES)


def _is_role(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")) | nodes.Name(name="role"):
            return True
        case nodes.Filter(node=nodes.Node() as filtered):
            return _is_role(filtered)
    return False


def _constants(node: nodes.Node) -> list[nodes.Const]:
    """Of a value, or of a list of some."""
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return [item for item in items if isinstance(item, nodes.Const)]


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises ChatTemplateError naming the first key that requests must not set."""
    for key in kwargs:
        if key in DENIED_KWARGS or key.startswith("_"):
            raise ChatTemplateError(f"chat_template_kwargs must not set {key!r}")


def _run(work: Callable[[], None], time_limit: float, output_limit: int) -> None:
    """Runs `work` within the bounds. Whatever it raises becomes a ChatTemplateError of one safe line."""

    def bounded() -> None:
        set_current_bounds(TemplateBounds(output_limit))
        work()

    try:
        _THREADS.run(bounded, time_limit)
    except ChatTemplateError:
        raise
    except TemplateSyntaxError as error:
        raise ChatTemplateError(_line(f"the chat template is not valid Jinja: line {error.lineno}: {error}")) from None
    except (TemplateError, TooLarge) as error:
        raise ChatTemplateError(_line(str(error)) or "the chat template refused the messages") from None
    except RecursionError:
        raise ChatTemplateError("the chat template or the messages are nested too deeply") from None
    except MemoryError:
        raise ChatTemplateError("the chat template needs too much memory") from None
    except Exception as error:
        raise ChatTemplateError(_line(f"the chat template failed: {type(error).__name__}: {error}")) from None


def _line(message: str) -> str:
    lines = message.splitlines()
    return lines[0][:500] if lines else ""


def _plain_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {name: _plain(value) for name, value in variables.items()}
    except RecursionError:
        raise ChatTemplateError("the messages are nested too deeply") from None


def _plain(value: Any) -> Any:
    """A copy made of JSON's own types: objects of any other kind have methods the sandbox knows nothing about."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise ChatTemplateError(f"chat templates take JSON values, not {type(value).__name__}")


def _mark_final_message(messages: list[Any]) -> str:
    """Puts a mark at the end of the final message's text, to find that place in the prompt again."""
    mark = f"[{secrets.token_hex(16)}]"
    final = messages[-1] if messages else None
    content = final.get("content") if isinstance(final, dict) else None
    if isinstance(final, dict) and isinstance(content, str):
        final["content"] = f"{content}{mark} "
        return mark
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] = f"{part['text']}{mark} "
            return mark
    raise ChatTemplateError("continue_final_message: the final message has no text to continue")


def _cut_at(mark: str, text: str) -> str:
    place = text.rfind(mark)
    if place < 0:
        raise ChatTemplateError("continue_final_message: the chat template leaves the final message out")
    if text.startswith(" ", place + len(mark)):
        return text[:place]
    # The space after the mark is gone, so the template trims content, and would have trimmed this one.
    return text[:place].rstrip()
