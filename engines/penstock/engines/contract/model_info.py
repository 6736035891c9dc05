"""Facts about a loaded model: its sizes, what it supports, and the work of its steps."""

from __future__ import annotations

import msgspec

from penstock.kvcache import KVGroup, StateGroup, longest_request


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of a model reads and computes, by the loaded model's own count. A multiplication and an addition are
    two FLOPs."""

    weight_bytes: int
    """Of the matrices that every step reads, as they are multiplied. A step reads only some rows of an embedding: it
    counts where it is also the head."""
    token_flops: int
    """Of one token: its products with matrices, the head left out."""
    logits_flops: int
    """Of the head, for one row of logits."""
    kv_bytes: tuple[int, ...]
    """Keys and values of one token, for each of `ModelInfo.kv_groups`."""
    attention_flops: tuple[int, ...]
    """Of one token, for each token that it attends to, in each of `ModelInfo.kv_groups`."""
    weights: str
    """Their type: bf16, f16, f32, int8 or int4."""
    activations: str
    """What they are multiplied with: int8, or a float type."""
    precision: str
    """Of the computation: bf16, f16 or f32."""
    threads: tuple[tuple[int, int], ...]
    """(fewest tokens of a step, compute threads), ascending; empty where it is not the CPU that computes."""


class ImageGrid(msgspec.Struct, frozen=True, array_like=True):
    """What a model's encoder takes: tiles, of which an image is one or several, in cells."""

    cell: int
    """Pixels of the side of a square that takes one position of a prompt."""
    side: int = 0
    """Pixels of the side of each tile; 0: tiles have any height and width that cells fill."""

    def tokens(self, height: int, width: int) -> int:
        """Positions of a prompt that a tile of so many pixels takes; 0: the encoder does not take it."""
        if self.side and not height == width == self.side:
            return 0
        rows, columns = height // self.cell, width // self.cell
        return rows * columns if (rows * self.cell, columns * self.cell) == (height, width) else 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What scheduler and gateway must know of a loaded model."""

    vocab_size: int
    """Rows of the embedding: valid token ids are below it."""
    max_model_len: int
    """Prompt and output together, in tokens."""
    kv_groups: tuple[KVGroup, ...]
    """At least one; each has a block table of its own for each request, all take their blocks from one pool."""
    num_blocks: int
    """Of the pool, for all groups together."""
    states: StateGroup | None = None
    """Of recurrent layers; None: the model has none."""
    guess_states: int = 0
    """States of recurrent layers that there is room for beside those rows: one for each guess of a step, and one for
    each request whose last guesses were not all right, up to the end of its next step."""
    eos_token_ids: tuple[int, ...]
    runner: str
    """The runner's name and its settings, for logs and /version: "openvino bf16, kv u8, 2 threads"."""
    numerics: str = ""
    """Number types of the computation and of the KV cache: on another machine, an engine of the same files and settings
    may have others. Empty where the engine does not say."""
    supports_logprobs: bool = True
    """False where tokens come from no distribution (the simulated runner)."""
    supports_pooling: bool = False
    """Requests may ask for a vector (`PoolingParams`)."""
    supports_drafts: bool = False
    """Steps may carry guesses to verify (`SchedulerOutput.drafts`)."""
    has_draft_model: bool = False
    """Steps may ask for guesses of a draft model (`TO_BE_DRAFTED`)."""
    supports_grammars: bool = False
    """Requests may say what their output has to be (`SamplingParams.grammar`)."""
    supports_processors: bool = False
    """Requests may name logits processors (`SamplingParams.processors`)."""
    image_grid: ImageGrid | None = None
    """Requests may have images (`AddRequest.images`), made of such tiles. None: the model reads text only."""
    has_grid_positions: bool = False
    """Tokens of images have positions of three dimensions, as their tiles lie (`NewRequest.tiles`). Each tile has one
    span of tokens."""
    whole_tiles: bool = False
    """Tokens of a tile attend to later ones of it, too: no step ends between them."""
    supports_resume: bool = False
    """Requests may go on behind tokens that another engine has put out (`AddRequest.output_token_ids`). Our scheduler
    supports this with every runner."""
    work: ModelWork | None = None
    """None: the runner does not count it."""
    chunk: int = 0
    """Most tokens of one request in a step, which windows need blocks for. The scheduler knows, a runner does not."""

    @property
    def tables(self) -> tuple[KVGroup, ...]:
        """Shapes of a request's tables: of blocks, one for each of `kv_groups`, and of rows of states behind them."""
        return self.kv_groups if self.states is None else (*self.kv_groups, self.states.table)

    @property
    def block_size(self) -> int:
        """Tokens of a block of the first group."""
        return self.kv_groups[0].block_size

    @property
    def context_length(self) -> int:
        """Prompt and output together that a request can have: a small KV cache shortens the model's own limit."""
        return longest_request(self.kv_groups, self.num_blocks, self.chunk, self.max_model_len)
