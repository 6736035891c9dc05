"""The data plane over an inline engine with the simulated runner, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import support.tokenizers
from penstock.engines.contract.messages import SamplingParams
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.gateway.models.language.adapters import AdapterSet
from penstock.gateway.models.language.dataplane import ChoiceDelta, DataPlane, GenerateRequest
from penstock.gateway.models.language.model_metrics import ModelMetrics
from penstock.gateway.models.language.models import LoadedModel
from penstock.tokenizers import ChatTemplate, Tokenizer
from support.inline_engine import InlineEngine
from support.writing import WritingRunner

MARKER = 5
EOS = 2
GREEDY = {"temperature": 0}


class Setup:
    def __init__(
        self,
        folder: Path,
        scheduler: SchedulerConfig,
        num_blocks: int,
        max_loras: int = 0,
        *,
        vocab_size: int | None = None,
        clamp_max_tokens: bool = False,
        answer: str | None = None,
    ) -> None:
        """`vocab_size`: the model's, if not the tokenizer's. `answer`: what the model writes to every request."""
        self.tokenizer = Tokenizer(support.tokenizers.save_folder(folder, support.tokenizers.byte_level()))
        config = SimulatedConfig(
            vocab_size=vocab_size or self.tokenizer.vocab_size,
            first_token_id=10,
            max_model_len=256,
            num_blocks=num_blocks,
            block_size=4,
            faults=f"nan={MARKER}",
            max_loras=max_loras,
            eos_token_ids=() if answer is None else (EOS,),
        )
        runner = SimulatedRunner(config)
        if answer is not None:
            runner = WritingRunner(config, [*self.tokenizer.encode(answer, add_special_tokens=False), EOS])
        self.engine = InlineEngine(runner, scheduler)
        self.metrics = ModelMetrics("m", lambda: self.engine.stats, lambda: self.engine.ready)
        template = ChatTemplate("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", {})
        self.model = LoadedModel(
            ("m", "alias"),
            "root",
            self.engine,
            self.tokenizer,
            template,
            self.metrics,
            GREEDY,
            guard=self.tokenizer.special_text_guard(template.source),
        )
        self.plane = DataPlane(clamp_max_tokens=clamp_max_tokens)
        self.plane.models.add(self.model)

    def take_adapters(self, adapters: AdapterSet) -> None:
        """The model has these from now on."""
        is_loaded = self.model.loaded
        self.plane.models.remove(self.model)
        self.model.adapters, self.model.loaded = adapters, is_loaded
        self.plane.models.add(self.model)

    async def generate(self, **fields: Any) -> list[ChoiceDelta]:
        async with await self.plane.generate(request(**fields)) as generation:
            return [delta async for deltas in generation for delta in deltas]


def request(max_tokens: int = 8, params: dict[str, Any] | None = None, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"max_tokens": max_tokens, **GREEDY, **(params or {})})
    return GenerateRequest(**{"model": "m", "prompts": ["a question"], "params": sampling, **fields})
