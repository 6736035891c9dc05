"""Inputs and outputs of a decoder's graph for one step.

Inputs, for T scheduled tokens of S requests: input_ids and position_ids [T] i64, subsequence_begins [S + 1] i32,
sampled_tokens_indices [N] i64 (which of the T tokens get logits), and for each layer n key_cache.n and value_cache.n.
For each group of layers that share block tables, with the suffix .0, .1, ... where there are several: past_lens [S]
i32, block_indices [B] i32 (the requests' block tables, one after another), block_indices_begins [S + 1] i32 and
max_context_len [] i32; those of a group with a window leave out the blocks behind it. Outputs: logits
[N, vocab] and hidden [N, hidden size] f32, the latter after the final norm.

A model that reads images has two more inputs: embeddings [E, W] f32, and embeddings_at [E] i64, which of the T tokens
are read as these. W is the hidden size, and as much again for each of the first layers behind which something is added
to these tokens (deepstack, arXiv:2406.04334). If tokens of images have positions of three dimensions, these are
grid_positions [T, 3] i64, and turn queries and keys.

A model with recurrent layers has the inputs that `recurrent` names, and tables of states.

A draft head has one more input, features [T, W] f32, and hidden is what its next guess is made of. The model whose
tokens it guesses has features as its last output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Input = tuple[type[np.generic], list[int]]

FEATURES = "features"
EMBEDDINGS, EMBEDDINGS_AT, GRID_POSITIONS = "embeddings", "embeddings_at", "grid_positions"

_STEP_INPUTS: dict[str, Input] = {
    "input_ids": (np.int64, [-1]),
    "position_ids": (np.int64, [-1]),
    "subsequence_begins": (np.int32, [-1]),
    "sampled_tokens_indices": (np.int64, [-1]),
}
GROUP_INPUTS: dict[str, Input] = {
    "past_lens": (np.int32, [-1]),
    "block_indices": (np.int32, [-1]),
    "block_indices_begins": (np.int32, [-1]),
    "max_context_len": (np.int32, []),
}


@dataclass(frozen=True)
class ImageInputs:
    """What the graph of a model that reads images is given of them."""

    width: int
    """Of its hidden state."""
    deepstack: int = 0
    """Layers behind which something is added."""
    has_grid_positions: bool = False

    @property
    def kinds(self) -> dict[str, Input]:
        """As `step_inputs`."""
        inputs: dict[str, Input] = {
            EMBEDDINGS: (np.float32, [-1, self.width * (1 + self.deepstack)]),
            EMBEDDINGS_AT: (np.int64, [-1]),
        }
        return inputs | ({GRID_POSITIONS: (np.int64, [-1, 3])} if self.has_grid_positions else {})


def step_inputs(num_groups: int) -> dict[str, Input]:
    """Type and shape of all inputs but the caches, by name."""
    inputs = dict(_STEP_INPUTS)
    for group in range(num_groups):
        inputs.update({name + group_suffix(group, num_groups): kind for name, kind in GROUP_INPUTS.items()})
    return inputs


def group_suffix(group: int, num_groups: int) -> str:
    """Of the names of a group's inputs."""
    return f".{group}" if num_groups > 1 else ""
