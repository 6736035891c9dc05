"""Parts that the layers of a decoder's graph share: matrices with adapters, norms, MLPs and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import openvino.opset15 as ops

from penstock.engines.openvino.decoder_spec import MLP, Clamp, DecoderSpec, Experts
from penstock.engines.openvino.expert_mix import alternating, clamped, mix
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, i64, parts, rms, scaled, sparse, xielu
from penstock.engines.openvino.lora import LoraGraph
from penstock.engines.openvino.weights import Weights


class DecoderParts:
    def __init__(self, spec: DecoderSpec, weights: Weights, lora: LoraGraph | None) -> None:
        """`lora`: what adapters add; None: there are none."""
        self._spec = spec
        self._weights = weights
        self._lora = lora

    def mlp(self, x: Node, n: int) -> Node:
        names, mlp = self._spec.names, self._spec.layers[n].mlp
        assert mlp is not None
        prefix = f"{names.layers}.{n}." + (names.mlp and f"{names.mlp}.")
        return self._one_mlp(x, prefix, mlp) if isinstance(mlp, MLP) else self.experts(x, prefix, mlp)

    def _one_mlp(
        self, x: Node, prefix: str, mlp: MLP, gate_up: tuple[str, ...] = (), down: str = "", width: int = 0
    ) -> Node:
        """Without `gate_up` and `down`: the names that all MLPs have. `width` of x; 0: that of the hidden state."""
        names, inner, transposed = self._spec.names, mlp.intermediate_size, mlp.transposed
        width = width or self._spec.hidden_size
        activate, sizes = self._activation(mlp, prefix), (inner,) * (1 + mlp.gated)
        matrices = gate_up or names.gate_up
        first, *second = self.linears(x, prefix, matrices, sizes, mlp.bias, width, transposed=transposed)
        first = scaled(first, mlp.gate_scale)
        first = sparse(first, mlp.sparsity) if mlp.sparsity else first
        y = ops.multiply(activate(first), second[0]) if second else activate(first)
        y = self.linear(y, prefix + (down or names.down), width, inner, mlp.bias, transposed)
        return scaled(y, mlp.output_scale)

    def _activation(self, mlp: MLP, prefix: str) -> Callable[[Node], Node]:
        if mlp.activation != "xielu":
            return ACTIVATIONS[mlp.activation]
        up, down = (self._weights.table(f"{prefix}act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n"))
        beta, least = (self._weights.table(f"{prefix}act_fn.{name}", ()) for name in ("beta", "eps"))
        return lambda x: xielu(x, up, down, beta, least)

    def experts(self, x: Node, prefix: str, mixture: Experts, routed: Node | None = None) -> Node:
        """`routed`: what the router gets; None: x."""
        names, scales = self._spec.names, None
        routed = x if routed is None else routed
        if mixture.router_norm:
            scale = self._weights.vector(prefix + "router.scale", self._spec.hidden_size)
            routed = scaled(ops.multiply(rms(routed, self._spec.norm_eps), scale), self._spec.hidden_size**-0.5)
            scales = self._weights.vector(prefix + "router.per_expert_scale", mixture.count)

        fused = f"{prefix}{names.experts}.0.gate_up_proj.weight" in self._weights
        gate_up = ("gate_up_proj",) if fused else ()

        def expert(rows: Node, number: int) -> Node:
            own = f"{prefix}{names.experts}.{number}."
            if mixture.clamp is not None:
                return self._clamped_mlp(rows, own, mixture.expert, mixture.clamp)
            return self._one_mlp(rows, own, mixture.expert, gate_up, names.expert_down, mixture.latent_size)

        logits = self._route(routed, prefix + names.router, mixture.count, mixture.router_bias)
        correction = names.correction and self._weights.vector(prefix + names.correction, mixture.count)
        hidden, latent = self._spec.hidden_size, mixture.latent_size
        bias = mixture.shared is not None and mixture.shared.bias
        inside = self.linear(x, prefix + names.latent[0], latent, hidden, bias) if latent else x
        y = mix(inside, logits, mixture, expert, correction or None, scales)
        y = self.linear(y, prefix + names.latent[1], hidden, latent, bias) if latent else y
        if mixture.shared is None:
            return y
        shared = self._one_mlp(x, f"{prefix}{names.shared_expert}.", mixture.shared)
        if not mixture.gated_share:
            return ops.add(y, scaled(shared, mixture.shared_scale))
        share = ops.sigmoid(self._route(x, f"{prefix}{names.shared_expert}_gate", 1, False))
        return ops.add(y, ops.multiply(share, shared))

    def _clamped_mlp(self, x: Node, prefix: str, mlp: MLP, clamp: Clamp) -> Node:
        names, hidden, inner = self._spec.names, self._spec.hidden_size, mlp.intermediate_size
        out = 2 * inner // len(names.gate_up)
        matrices = [self.linear(x, prefix + name, out, hidden, mlp.bias, mlp.transposed) for name in names.gate_up]
        gate, up = matrices if len(matrices) > 1 else alternating(matrices[0])
        y = clamped(gate, up, clamp)
        return self.linear(y, prefix + names.down, hidden, inner, mlp.bias, mlp.transposed)

    def _route(self, x: Node, name: str, count: int, bias: bool) -> Node:
        """[T, count]; these weights stay as they are: rounding would choose other experts."""
        y = ops.matmul(x, self._weights.table(name + ".weight", (count, self._spec.hidden_size)), False, True)
        return ops.add(y, self._weights.vector(name + ".bias", count)) if bias else y

    def linears(
        self,
        x: Node,
        prefix: str,
        names: Sequence[str],
        sizes: Sequence[int],
        bias: bool,
        width: int = 0,
        transposed: bool = False,
    ) -> list[Node]:
        """Of the hidden state, or of x of another `width`; in some families one matrix has all of their rows."""
        hidden = width or self._spec.hidden_size
        if len(names) == len(sizes):
            return [
                self.linear(x, prefix + name, size, hidden, bias, transposed)
                for name, size in zip(names, sizes, strict=True)
            ]
        return parts(self.linear(x, prefix + names[0], sum(sizes), hidden, bias, transposed), sizes, 1)

    def linear(self, x: Node, name: str, out: int, inner: int, bias: bool, transposed: bool = False) -> Node:
        transposed = transposed or self._spec.transposed
        y = self._weights.project(x, name + ".weight", (out, inner), transposed=transposed)
        if bias:
            y = ops.add(y, self._weights.vector(name + ".bias", out))
        # An expert's rows are not in the order of the tokens, by which adapters are chosen.
        if self._lora is None or f".{self._spec.names.experts}." in name:
            return y
        return self._lora.add(y, x, name, out, inner)

    def norm(self, x: Node, name: str, size: int) -> Node:
        """Without a name, x as it is."""
        spec = self._spec
        if not name:
            return x
        y = self.normed(x)
        if spec.norm.endswith("without weights"):
            return y
        y = ops.multiply(y, self._weights.vector(name + ".weight", size, plus=spec.norm_offset))
        return ops.add(y, self._weights.vector(name + ".bias", size)) if spec.norm == "layer" else y

    def normed(self, x: Node) -> Node:
        if self._spec.norm.startswith("rms"):
            return rms(x, self._spec.norm_eps)
        return ops.mvn(x, i64([-1]), True, self._spec.norm_eps, "inside_sqrt")
