"""What fronts ask the data plane to generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engines.contract.messages import SamplingParams
from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.truncation import Truncation
from penstock.tokenizers import StageFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What to generate. Fronts build it from their own schemas; `DataPlane.generate` validates it against the model."""

    model: str
    prompts: Sequence[str | list[int]]
    """Texts, encoded by the model's tokenizer, or token ids as they are."""
    params: SamplingParams
    """`max_tokens` 0 means: whatever the context leaves."""
    clamps: bool = True
    """`max_tokens` is an upper bound: a prompt behind which the context leaves less gets that. False: it is refused."""
    grammar_field: str | None = None
    """What the caller calls `params.grammar`, for errors."""
    n: int = 1
    """Samples per prompt."""
    stop: tuple[str, ...] = ()
    """Looked for in each choice's text; with stages, in what they leave as text."""
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    """Texts for `params.bad_words`, which has their tokens."""
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that are text although the others are skipped: stages look for them."""
    stages: tuple[StageFactory, ...] = ()
    """What looks for reasoning, tool calls and other parts in each choice's text, in this order. The first sees what
    the model wrote, with the special tokens in `shown_tokens`. Only fronts that have fields for such parts name stages;
    the others show the text as the model wrote it."""
    show_reasoning: bool = True
    """Whether deltas have the reasoning that stages find. It is counted in any case."""
    suffix: str | None = None
    """What stands behind the text that is to be filled in; the prompts stand before it. Only of models with tokens for
    that."""
    prediction: str = ""
    """The text for `params.prediction`, which has its tokens."""
    truncation: Truncation | None = None
    """How prompts are cut before they are judged by their length."""
    add_special_tokens: bool = True
    """For text prompts: let the tokenizer add BOS and the like. False for rendered chat templates."""
    priority: int = 0
    """What the caller asks for; `level` is what counts."""
    context: RequestContext = field(default_factory=RequestContext)
    tenant: str = ""
    """Whom a fair scheduler charges, and who alone may use these prompts' cached prefixes. The context's, if that has
    one."""
    cache_salt: str = ""
    session: str = ""
    """The caller's name for requests that belong together: where there are replicas, one serves them all while that
    costs little."""
    cache_retention: int = 0
    """Seconds for which the prompts are evicted from the prefix cache later than others; 0: no later."""
    pulse: float | None = None
    """After so many seconds with nothing to show, and again after as many, the generation yields an empty list: a front
    can tell its client that the request is alive. Not before the engine has taken the request in."""

    @property
    def level(self) -> int:
        """Its priority in the queue; lower runs earlier. A key can keep its requests from running early."""
        return max(self.priority, self.context.principal.priority)
