"""Runs decoder layers with attention, the gated delta rule, Mamba2 or a short convolution, and a gated MLP, in one call of the library, so that
no Python runs between their kernels, and of others the part before the MLP, or the only part that they have.

The kernels and their results are those of the separate modules, except that the weights of q, k and v are joined if possible, so that one
product makes all three, and that a kernel computes the decays and strengths of recurrences. The kernels' arguments are kept from step to step,
and only what a step changes is written into them.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import accumulate
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.modeling_outputs import MoeModelOutputWithPast

from batchgen.kernels.build import kernel, library
from batchgen.kernels.fusion import FusedGatedNorm, FusedMLP, FusedNorm, RotaryForm, of_both_halves
from batchgen.kernels.int8 import Int8Linear, QuantizeArguments, QuantizedRows, Rounding, empty_rows, row_length
from batchgen.kernels.memory import give_back, in_huge_pages
from batchgen.kernels.ops import (
    Activation,
    ActivationArguments,
    Call,
    Calls,
    Heads,
    NormArguments,
    PackedLinear,
    RotaryArguments,
    RowTable,
    address_of,
)
from batchgen.kernels.recognition import has_cache
from batchgen.kernels.recurrent import Convolution, Gate, GatedNorm, RecurrentGates, Rule

T = TypeVar("T")
Linear = PackedLinear | Int8Linear
Turns = tuple[torch.Tensor, torch.Tensor]
"""Cos and sin of the tokens' positions, [1, T, R] each."""


class AttentionCall(Protocol):
    """What is used here of `cpu_backend.LayerAttention`."""

    call: Call


class Attends(Protocol):
    """What is used here of `PackedAttention`."""

    cache: Any
    positions: NDArray[np.int64]

    def prepared(
        self,
        layer: int,
        heads: tuple[Heads, Heads, Heads],
        out: int,
        dtype: torch.dtype,
        options: Any,
        compact: bool = False,
    ) -> AttentionCall: ...

    def take_over(self, prepared: Any) -> None: ...

    def wanted(self, layer: int) -> torch.Tensor | None: ...


class Recurs(Protocol):
    """What is used here of `StateStep`."""

    def take_over(
        self, layer: int, convolution: Convolution, rule: Rule | None, gates: RecurrentGates | None
    ) -> None: ...


class LayerNorms(NamedTuple, Generic[T]):
    """The norms of a decoder layer; None where it has none."""

    before_attention: T | None = None
    after_attention: T | None = None
    """Before the sum with the residual."""
    before_mlp: T | None = None
    after_mlp: T | None = None
    """Before the sum with the residual."""


def joined(parts: Sequence[Linear]) -> Sequence[Linear]:
    """Joins layers that read the same x into one, whose memory they then share.

    Returns them unchanged if one does not fill its last panel, is in codes, has an adapter or shares its weights, if one would be joined twice,
    because it stands in several places, or if they round x in different ways.
    """
    panel = library().batchgen_linear_panel()
    if len(parts) == 1 or any(part.out_features % panel for part in parts):
        return parts
    if len({id(part) for part in parts}) < len(parts) or any(map(_stays_apart, parts)):
        return parts
    if len({part.rounding for part in parts if isinstance(part, Int8Linear)}) > 1:
        return parts
    whole = copy.copy(parts[0])
    whole.out_features = sum(part.out_features for part in parts)
    apart = [part.weights for part in parts if part.weights is not None]
    whole.weights = in_huge_pages(torch.cat(apart))
    for part, weights in zip(parts, torch.split(whole.weights, list(map(len, apart))), strict=True):
        part.weights = weights
    for weights in apart:
        give_back(weights)
    for name in ("scales", "beginnings"):  # of 8 bits
        if getattr(whole, name, None) is not None:
            setattr(whole, name, torch.cat([getattr(part, name) for part in parts]))
    if any(part.biases is not None for part in parts):
        whole.biases = torch.cat(
            [torch.zeros(p.out_features // panel, panel) if p.biases is None else p.biases for p in parts]
        )
    return [whole]


def _stays_apart(part: Linear) -> bool:
    """Whether a layer's weights are codes, or also those of another layer, or a part of those of a joined one, or have an adapter beside them."""
    return (
        part.adapter is not None
        or part.tied
        or part.weights is None
        or part.weights.untyped_storage().nbytes() > part.weights.nbytes
    )


@dataclass(frozen=True, eq=False)
class Attention:
    """What a layer with attention does between its first linear layers, which make q, k and v, and the last one."""

    heads: int
    kv_heads: int
    head_size: int
    options: Any
    """The layer's options of attention (`LayerOptions`)."""
    head_norms: Sequence[FusedNorm]
    """Empty, or a norm for the queries and one for the keys, of each head or of all heads together."""
    late_norms: bool
    """Whether the norms come after rotary embeddings."""
    gated: bool
    """Whether each head of queries is followed by a gate of its output."""
    rotary: RotaryForm | None
    """How queries and keys are turned; None if they are not."""
    scaled_from: int | None
    """The position from which queries are scaled, which is not done here."""
    value_norm: FusedNorm | None
    """Of each head of values, if they have one."""
    made: int
    """How many of q, k and v the linear layers make. With two, values are the keys before their norm; with one, both are those of an earlier layer."""

    @property
    def own_kv(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.made > 1

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The numbers a token of the linear layers' outputs, of queries, of keys and values with norms, and of attention's output."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return q * (1 + self.gated) + (self.made - 1) * kv, q, kv * (1 if self.value_norm is None else 2), q


@dataclass(frozen=True, eq=False)
class Recurrence:
    """What a recurrent layer does between its first linear layers and the last one: a causal convolution, the gated delta rule or Mamba2's
    recurrence, and a gated norm.

    With the gated delta rule, the first linear layers make queries, keys and values, which are convolved, gates of the outputs, strengths and decays.
    In Mamba2 they make gates, then x, B and C, which are convolved and stand for values, keys and queries, and steps.
    """

    delta: bool
    """Whether this is the gated delta rule."""
    groups: int
    """Heads of queries and keys."""
    heads: int
    key_size: int
    value_size: int
    taps: torch.Tensor
    """Of the convolution, [K, channels]."""
    bias: torch.Tensor | None
    """Of the convolution."""
    activation: int
    rates: torch.Tensor
    """Float32 [H]; a head's decay is e^(rate * softplus(a + bias)), with its bias of `biases`."""
    biases: torch.Tensor
    skip: torch.Tensor | None
    """Float32 [H]: D of Mamba2."""
    limits: tuple[float, float]
    """Of Mamba2's steps in prompts."""
    norm: FusedGatedNorm
    factor: torch.Tensor
    """Of the norm, for all heads, one after the other; float32."""
    step: Callable[[], Recurs]
    """Returns the states of the present step."""

    @property
    def values(self) -> int:
        """The numbers a token of all heads' values."""
        return self.heads * self.value_size

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The numbers a token of the linear layers' outputs, of the convolution, of decays and strengths, which are float32, and of the recurrence,
        which in Mamba2 are float32."""
        convolved = self.taps.shape[1]
        inputs = convolved + self.values + self.heads * (1 + self.delta)
        return inputs, convolved, 4 * self.heads, self.values * (1 if self.delta else 2)


@dataclass(frozen=True, eq=False)
class ShortConvolution:
    """c * convolution(b * x), where the first linear layer makes b, c and x."""

    taps: torch.Tensor
    """[K, channels]"""
    bias: torch.Tensor | None
    step: Callable[[], Recurs]
    """Returns the states of the present step."""

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The numbers a token of the linear layer's outputs, of b * x, of nothing, and of the convolution."""
        channels = self.taps.shape[1]
        return 3 * channels, channels, 0, channels


@dataclass(frozen=True, eq=False)
class OwnInput:
    """What a layer's own input p adds to its output s: norm(projection(act(gate(s)) * p))."""

    gate: Linear
    activation: int
    projection: Linear
    norm: FusedNorm


@dataclass(frozen=True, eq=False)
class PlainMLP:
    """down(act(up(x)))"""

    gate_up: Linear
    """up; under the name that it has in `FusedMLP`."""
    activation: Activation
    down: Linear


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """s = x + o(mixer(inputs(norm(x)))) and norm(s), then s + down(act(gate(norm(s))) * up(norm(s))), with the norms that the layer has.

    What is added to x and to s is multiplied by `by` before, and the output by `times`.
    """

    index: int
    norms: LayerNorms[FusedNorm]
    inputs: Sequence[Linear]
    """The linear layers that read x. What they make lies side by side in this order."""
    mixer: Attention | Recurrence | ShortConvolution
    o: Linear
    mlp: FusedMLP | PlainMLP | None
    """None if the layer ends before its MLP, or has none: then there is no norm before it either."""
    own_input: OwnInput | None = None
    by: float = 1.0
    times: float = 1.0
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """Float32 [hidden], if what is added to x, and to s, is also multiplied by numbers of its own."""


class Workspace:
    """Memory for the results between kernels, which the layers of a model share. It grows."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._in_8_bits: QuantizedRows | None = None

    def at(self, size: int) -> int:
        """Returns the address of at least `size` bytes."""
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory.data_ptr()

    def in_8_bits(self, rows: int, size: int) -> QuantizedRows:
        """Returns room for at least `rows` quantized rows of up to `size` numbers. Kernels that run one after the other share it."""
        found = self._in_8_bits
        if found is None or found.values.numel() < rows * row_length(size):
            self._in_8_bits = found = empty_rows(rows, size)
        return found


class DenseStack:
    """Decoder layers that run one after the other, and the norm after the last one, if there is one. Or one layer without MLP."""

    def __init__(self, layers: Sequence[DenseLayer], norm: FusedNorm | None, workspace: Workspace) -> None:
        self.layers = layers
        self.norm = norm
        self._workspace = workspace
        self._rows = 0
        """Rows for which the workspace has room."""
        widths = [_widths(layer) for layer in layers]
        self._row, self._widest = max(map(sum, widths)), max(map(max, widths))
        self._has_8_bits = any(isinstance(layer.o, Int8Linear) for layer in layers)
        self._prepared: dict[bool, _Prepared] = {}
        """By whether the last layer leaves tokens out."""
        attending = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
        forms = {mixer.rotary for mixer in attending if mixer.rotary is not None}
        dtype = layers[0].o.dtype
        self._cos_types = [of for of in {dtype, torch.float32} if all(form.takes(of, dtype) for form in forms)]
        self._head_size = min((mixer.head_size for mixer in attending if mixer.rotary is not None), default=0)
        self._scaled_from = min((of.scaled_from for of in attending if of.scaled_from is not None), default=None)

    @property
    def row_bytes(self) -> int:
        """Memory between the kernels, for each token."""
        size: int = self._row * self.layers[0].o.dtype.itemsize
        return size

    def __deepcopy__(self, memo: dict[int, Any]) -> DenseStack:
        """Returns a copy without the prepared calls, which read the original's weights."""
        return DenseStack(
            copy.deepcopy(self.layers, memo), copy.deepcopy(self.norm, memo), copy.deepcopy(self._workspace, memo)
        )

    def takes(self, x: torch.Tensor, turns: Turns | None, attention: Attends) -> bool:
        """Whether the kernels can read this x [1, T, hidden] and these cos and sin, and no query is scaled."""
        first = self.layers[0].inputs[0]
        return (
            x.dim() == 3
            and x.shape[0] == 1
            and x.shape[2] == first.in_features
            and x.is_contiguous()
            and x.dtype == first.dtype
            and (not self._head_size or (turns is not None and self._turns_by(x, *turns)))
            and (self._scaled_from is None or attention.positions.max(initial=0) < self._scaled_from)
        )

    def _turns_by(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return (
            cos.dim() == 3
            and cos.shape[:2] == x.shape[:2]
            and cos.dtype == sin.dtype
            and cos.dtype in self._cos_types
            and cos.shape == sin.shape
            and cos.stride() == sin.stride()
            and cos.stride(2) == 1
            and cos.shape[2] <= self._head_size
            and cos.shape[2] % 2 == 0
        )

    def __call__(
        self, x: torch.Tensor, turns: Turns | None, attention: Attends, own_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the output for x [1, T, hidden], which `takes` must accept. Rows that `attention` does not want of the last layer are 0.

        A layer without keys and values of its own gets the x of the wanted tokens alone. `own_input` [1, T, P]: of the only layer.
        """
        out, wanted = self._run(x, turns, attention, own_input=own_input)
        return out if wanted is None else torch.zeros_like(x).index_copy_(1, wanted, out)

    def before_mlp(
        self, x: torch.Tensor, turns: Turns | None, attention: Attends
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the residual and what the MLP reads, [1, W, hidden] of the W tokens that are wanted, and their places, as `PackedAttention.wanted`."""
        normed = torch.empty_like(x)
        out, wanted = self._run(x, turns, attention, normed)
        return out, normed[:, : out.shape[1]], wanted

    def _run(
        self, x: torch.Tensor, turns: Turns | None, attention: Attends, normed: torch.Tensor | None = None,
        own_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Returns the output [1, W, hidden] of the tokens that are wanted, and their places; None if these are all of x.

        `normed`: memory for its norm, in a layer without MLP.
        """
        last = self.layers[-1]
        wanted = attention.wanted(last.index)
        if isinstance(last.mixer, Attention) and not last.mixer.own_kv:
            wanted = None  # x has no other tokens
        if wanted is not None and own_input is not None:
            own_input = own_input.index_select(1, wanted)
        rows = x.shape[1]
        if rows > self._rows:
            self._prepared.clear()
            self._rows = rows + rows // 4  # so that a step that is a little larger needs no new arguments
        memory = self._workspace.at(self._rows * self._row * x.itemsize)
        in_8_bits = None
        if self._has_8_bits:
            in_8_bits = self._workspace.in_8_bits(self._rows, self._widest)
        cos, sin = turns if self._head_size and turns is not None else (None, None)
        of_cos = None if cos is None else (cos.dtype, cos.shape[2], cos.stride(1))
        settings = (memory, in_8_bits, x.dtype, of_cos, torch.get_num_threads())
        prepared = self._prepared.get(wanted is not None)
        if prepared is None or prepared.settings != settings or prepared.cache() is not attention.cache:
            prepared = self._prepared[wanted is not None] = _Prepared(self, settings, self._rows, attention, wanted)
        out_rows = rows if wanted is None else len(wanted)
        out = torch.empty((1, out_rows, x.shape[2]), dtype=x.dtype)
        prepared.run(
            attention,
            {
                _Now.ROWS: rows,
                _Now.OUT_ROWS: out_rows,
                _Now.X: x.data_ptr(),
                _Now.OUT: out.data_ptr(),
                _Now.NORMED: address_of(normed),
                _Now.COS: address_of(cos),
                _Now.SIN: address_of(sin),
                _Now.WANTED: address_of(wanted),
                _Now.OWN: address_of(own_input),
                _Now.OWN_ROW: 0 if own_input is None else own_input.stride(1),
            },
        )
        return out, wanted


def in_one_call(
    by_parts: Callable[..., torch.Tensor], rest: Callable[..., torch.Tensor] | None = None
) -> Callable[..., torch.Tensor]:
    """Returns the forward of a layer that has a `DenseLayer`. `by_parts` runs if the dense layer does not take the inputs.

    `rest`: of a layer of which the call ends before its MLP, the rest, which gets the layer, its inputs and what `DenseStack.before_mlp` returns.
    """

    def forward(self: Any, hidden_states: torch.Tensor, *own: Any, **kwargs: Any) -> torch.Tensor:
        attention: Any = kwargs.get("step_attention")
        if hasattr(attention, "prepared") and kwargs.get("attention_mask") is None and not has_cache(kwargs):
            dense: DenseStack = self.dense
            turns: Turns | None = kwargs.get("position_embeddings")
            form = getattr(dense.layers[0].mixer, "rotary", None)
            if turns is not None and form is not None and form.of_halves:
                turns = of_both_halves(*turns)
            if dense.takes(hidden_states, turns, attention):
                if rest is None:
                    return dense(hidden_states, turns, attention, *own)
                return rest(self, hidden_states, *dense.before_mlp(hidden_states, turns, attention))
        return by_parts(self, hidden_states, *own, **kwargs)

    return forward


def stack_forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: Any = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> Any:
    """The forward of a body that has a `DenseStack`. The body's own runs for inputs that the stack does not take, and if its parts have hooks."""
    attention: Any = kwargs.get("step_attention")
    plain = (
        hasattr(attention, "prepared")
        and attention_mask is None
        and use_cache is False
        and position_ids is not None
        and all(value is None or value is False for name, value in kwargs.items() if name != "step_attention")
        and not any(part._forward_hooks or part._forward_pre_hooks for part in (*self.layers, self.stack.norm))
    )
    if plain:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if hasattr(self, "embedding_multiplier"):
            x = x * self.embedding_multiplier
        turns = None if self.rotary_emb is None else self.rotary_emb(x, position_ids)
        if self.stack.takes(x, turns, attention):
            # Heads of models that may be mixtures read more of it than others.
            return MoeModelOutputWithPast(last_hidden_state=self.stack(x, turns, attention))
    return type(self).forward(
        self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds,
        use_cache=use_cache, **kwargs,
    )  # fmt: skip


def _widths(layer: DenseLayer) -> tuple[int, ...]:
    """Returns the numbers a token of each result between the kernels (`_LayerResults`); even, so that float32 among bfloat16 is aligned."""
    hidden = layer.o.out_features
    mlp: list[Any] = [] if layer.mlp is None else [layer.mlp.gate_up, layer.mlp.down]
    own: list[Any] = [] if layer.own_input is None else [layer.own_input.gate, layer.own_input.projection]
    adapters = [part.adapter for part in (*layer.inputs, layer.o, *mlp, *own)]
    low = max((each.down.out_features for each in adapters if each is not None), default=0)
    gated = max((part.out_features for part in (*mlp[:1], *own[:1])), default=0)
    widths = hidden, hidden, *layer.mixer.widths, hidden, hidden, gated, low
    return tuple(width + width % 2 for width in widths)


class _LayerResults(NamedTuple):
    """The addresses of the results between a layer's kernels. Each is contiguous, and is used again in the next layer."""

    residual: int
    """The layer's input, except in the first layer."""
    normed: int
    inputs: int
    """Of the mixer: queries, keys and values, and gates."""
    q: int
    """Or what was or will be convolved."""
    k: int
    """And values, if they have a norm. Or decays and strengths."""
    mixed: int
    more: int
    """What is added to the residual."""
    total: int
    gated: int
    low: int
    """Of an adapter's first product."""


class _Now(IntEnum):
    """A number that a step writes into the arguments of kernels."""

    ROWS = auto()
    OUT_ROWS = auto()
    """Rows of the last layer after attention."""
    X = auto()
    OUT = auto()
    NORMED = auto()
    COS = auto()
    SIN = auto()
    WANTED = auto()
    OWN = auto()
    """Of the layer's own input, and from one row to the next."""
    OWN_ROW = auto()


_Place = int | _Now
"""An address, or one that a step has."""


class _Prepared:
    """The calls of all kernels of a stack, for any step of at most `rows` tokens with these settings and this cache."""

    def __init__(
        self, stack: DenseStack, settings: tuple[Any, ...], rows: int, attention: Attends, wanted: torch.Tensor | None
    ) -> None:
        self.settings = settings
        self.cache = weakref.ref(attention.cache)
        memory, self._in_8_bits, self._dtype, self._of_cos, self._threads = settings
        self._rows = _Now.ROWS  # of the kernels that are added next
        self._most_rows = rows
        self._attentions: list[AttentionCall] = []
        self._recurrent: list[
            tuple[int, Recurrence | ShortConvolution, Convolution, Rule | None, RecurrentGates | None]
        ] = []
        self._later: defaultdict[_Now, list[tuple[ctypes.Structure, str]]] = defaultdict(list)
        self._added: list[Call] = []
        self._quantized: tuple[_Place, Rounding] | None = None
        """The address of the rows of which `_in_8_bits` has the numbers, after the kernels that were added."""

        layers = stack.layers
        hidden = layers[0].o.out_features
        y: _Place = _Now.X
        residual: _Place = _Now.X
        for i, layer in enumerate(layers):
            starts = accumulate(_widths(layer)[:-1], initial=0)
            at = _LayerResults(*(memory + rows * start * self._dtype.itemsize for start in starts))
            if i == 0:
                y = self._norm_of(layer.norms.before_attention, _Now.X, at.normed, read=layer.inputs[0])
            to, row = at.inputs, layer.mixer.widths[0]
            for part in layer.inputs:
                self._product(part, y, to, row, at)
                to += part.out_features * self._dtype.itemsize
            mixed = self._mix(layer, at, attention)
            if wanted is not None and i + 1 == len(layers):
                residual, mixed = self._take_wanted(layer, residual, at)
            self._product(layer.o, mixed, at.more, hidden, at)
            y = self._norm_of(layer.norms.after_attention, at.more, at.normed)
            if layer.mlp is None:
                self._norm_of_sum(layer, layer.norms.before_mlp, residual, y, _Now.OUT, _Now.NORMED)
                break
            mlp: Any = layer.mlp
            first, second = layer.scales
            y = self._norm_of_sum(
                layer, layer.norms.before_mlp, residual, y, at.total, at.normed, mlp.gate_up, each=first
            )
            self._run_mlp(mlp, y, hidden, at)
            y = self._norm_of(layer.norms.after_mlp, at.more, at.normed)
            total = at.total
            if layer.own_input is not None:
                y, total = self._add_own_input(layer, layer.own_input, y, at), at.residual
            if i + 1 < len(layers):
                following = layers[i + 1]
                norm = following.norms.before_attention
                read = following.inputs[0]
                y = self._norm_of_sum(layer, norm, total, y, at.residual, at.normed, read, layer.times, second)
                residual = at.residual
            elif stack.norm is None:
                self._norm_of_sum(layer, None, total, y, _Now.OUT, at.normed, times=layer.times, each=second)
            else:
                self._norm_of_sum(layer, stack.norm, total, y, at.residual, _Now.OUT, times=layer.times, each=second)
        self._calls = Calls(self._added)

    def run(self, attention: Attends, now: dict[_Now, int | None]) -> None:
        """Runs the kernels with these numbers, and this step's attention."""
        for name, number in now.items():
            for argument, field in self._later[name]:
                setattr(argument, field, number)
        for prepared in self._attentions:
            attention.take_over(prepared)
        for layer, mixer, convolution, rule, gates in self._recurrent:
            mixer.step().take_over(layer, convolution, rule, gates)
        self._calls.run()

    def _add(self, call: Call, **fields: Any) -> None:
        """Adds the call of a kernel, with these fields of its argument. They may be numbers of a step."""
        for name, value in fields.items():
            if isinstance(value, _Now):
                self._later[value].append((call.argument, name))
            else:
                setattr(call.argument, name, value)
        self._added.append(call)

    def _mix(self, layer: DenseLayer, at: _LayerResults, attention: Attends) -> int:
        """Adds what a layer does between its first linear layers and the last one. Returns where the output is."""
        if isinstance(layer.mixer, Attention):
            return self._attend(layer.index, layer.mixer, at, attention)
        if isinstance(layer.mixer, ShortConvolution):
            return self._convolve(layer.index, layer.mixer, at)
        return self._recur(layer.index, layer.mixer, at)

    def _attend(self, index: int, mixer: Attention, at: _LayerResults, attention: Attends) -> int:
        """Adds the norms and rotary embeddings of q, k and v, attention, and its gate. Returns where the output is."""
        size, bytes_ = mixer.head_size, self._dtype.itemsize
        row, q_width, *_ = mixer.widths
        kv_heads, kv_width = mixer.kv_heads * mixer.own_kv, mixer.kv_heads * size
        apart = size * (1 + mixer.gated)
        keys = at.inputs + apart * mixer.heads * bytes_
        values = Heads(keys + (mixer.made - 2) * kv_width * bytes_, kv_heads, size, size, row)
        plain = Heads(at.inputs, mixer.heads, size, apart, row), Heads(keys, kv_heads, size, size, row)
        turned = Heads(at.q, mixer.heads, size, size, q_width), Heads(at.k, kv_heads, size, size, kv_width)
        if mixer.value_norm is not None:
            place = Heads(at.k + kv_width * self._most_rows * bytes_, kv_heads, size, size, kv_width)
            self._norm(mixer.value_norm, kv_heads, size, row, x=values.at, y=place.at)
            values = place
        heads = plain
        if mixer.head_norms and not mixer.late_norms:
            heads = self._norm_heads(mixer, heads, turned)
        if mixer.rotary is not None:
            self._rotary(mixer.rotary, heads, turned)
            heads = turned
        if mixer.head_norms and mixer.late_norms:
            heads = self._norm_heads(mixer, heads, turned)
        q, k = heads
        if not mixer.own_kv:
            k = values = Heads(0, mixer.kv_heads, size, size, 0)
        prepared = attention.prepared(index, (q, k, values), at.mixed, self._dtype, mixer.options, not mixer.own_kv)
        self._attentions.append(prepared)
        self._added.append(prepared.call)
        if mixer.gated:
            self._gate(
                Activation.SIGMOID, size, inner=mixer.heads, x_row=size, gate_row=row, gate_inner=apart,
                x=at.mixed, gate=at.inputs + size * bytes_, y=at.mixed,
            )  # fmt: skip
        return at.mixed

    def _norm_heads(self, mixer: Attention, heads: tuple[Heads, Heads], to: tuple[Heads, Heads]) -> tuple[Heads, Heads]:
        """Adds the norms of queries and keys, into `to`, which may be the same memory. Returns it."""
        for norm, of, place in zip(mixer.head_norms, heads, to, strict=False):
            width = len(norm.factor)
            inner, apart = of.heads * of.size // width, of.to_head if width == of.size else width
            self._norm(norm, inner, width, of.to_token, x_inner=apart, x=of.at, y=place.at)
        return to

    def _convolve(self, index: int, mixer: ShortConvolution, at: _LayerResults) -> int:
        """Adds the convolution and the products before and after it. Returns where the output is."""
        row, channels, _, _ = mixer.widths
        b, c, x = (at.inputs + i * channels * self._dtype.itemsize for i in range(3))
        convolution = Convolution(
            channels=channels, taps=len(mixer.taps) - 1, x_token=channels, threads=self._threads,
            x=at.q, weight=mixer.taps.data_ptr(), bias=address_of(mixer.bias), out=at.mixed,
        )  # fmt: skip
        self._recurrent.append((index, mixer, convolution, None, None))
        self._gate(Activation.NONE, channels, x_row=row, gate_row=row, x=x, gate=b, y=at.q)
        self._added.append(Call(kernel("convolve", self._dtype), convolution))
        self._gate(Activation.NONE, channels, x_row=channels, gate_row=row, x=at.mixed, gate=c, y=at.mixed)
        return at.mixed

    def _gate(self, activation: int, size: int, *, inner: int = 1, **fields: Any) -> None:
        """Adds the products of x and a gate, `inner` parts of `size` numbers in each row. `fields`: the others of its argument."""
        call = Call(kernel("gate", self._dtype), Gate(activation=activation, threads=self._threads))
        self._add(call, rows=self._rows, inner=inner, size=size, **fields)

    def _run_mlp(self, mlp: Any, x: _Place, hidden: int, at: _LayerResults) -> None:
        """Adds an MLP of the rows at x."""
        size = mlp.gate_up.out_features
        self._product(mlp.gate_up, x, at.gated, size, at)
        if isinstance(mlp, PlainMLP):
            call = Call(kernel("activate", self._dtype), ActivationArguments(0, size, mlp.activation, self._threads))
            self._add(call, rows=self._rows, y=at.gated)
        self._product(mlp.down, at.gated, at.more, hidden, at)

    def _recur(self, index: int, mixer: Recurrence, at: _LayerResults) -> int:
        """Adds the convolution, the recurrence and its gated norm. Returns where the output is."""
        bytes_ = self._dtype.itemsize
        row, convolved, _, _ = mixer.widths
        keys, values = mixer.groups * mixer.key_size, mixer.values
        if mixer.delta:
            x, gate, b = (at.inputs + before * bytes_ for before in (0, convolved, convolved + values))
            a = b + mixer.heads * bytes_
            q, k, v = (at.q + before * bytes_ for before in (0, keys, 2 * keys))
        else:
            gate, x, a = (at.inputs + before * bytes_ for before in (0, values, values + convolved))
            b = 0
            v, k, q = (at.q + before * bytes_ for before in (0, values, values + keys))
        strengths = at.k + 4 * mixer.heads * self._most_rows
        convolution = Convolution(
            channels=convolved, taps=len(mixer.taps) - 1, x_token=row, activation=mixer.activation, threads=self._threads,
            x=x, weight=mixer.taps.data_ptr(), bias=address_of(mixer.bias), out=at.q,
        )  # fmt: skip
        rule = Rule(
            heads=mixer.heads, groups=mixer.groups, rows=mixer.key_size, columns=mixer.value_size, normalize=mixer.delta,
            q_token=convolved, k_token=convolved, v_token=convolved, threads=self._threads, decay=at.k, strength=strengths,
            skip=address_of(mixer.skip), q=q, k=k, v=v, out=at.mixed, scale=mixer.key_size**-0.5 if mixer.delta else 1,
        )  # fmt: skip
        gates = RecurrentGates(
            heads=mixer.heads, token=row, threads=self._threads, b=b, a=a, rate=mixer.rates.data_ptr(), bias=mixer.biases.data_ptr(),
            decay=at.k, strength=strengths, least=mixer.limits[0], most=mixer.limits[1],
        )  # fmt: skip
        self._recurrent.append((index, mixer, convolution, rule, gates))
        self._added.append(Call(kernel("convolve", self._dtype), convolution))
        self._add(Call(kernel("recurrent_gates", self._dtype), gates), tokens=self._rows)
        self._added.append(Call(kernel("delta_rule" if mixer.delta else "mamba2", self._dtype), rule))
        norm = mixer.norm
        groups = norm.groups * (mixer.heads if mixer.delta else 1)
        to = kernel("gated_norm", self._dtype)
        if not mixer.delta and self._dtype == torch.bfloat16:
            to = kernel("gated_norm", torch.float32, "_to_bfloat16")
        self._add(
            Call(to, GatedNorm(threads=self._threads, eps=norm.eps)),
            rows=self._rows, groups=groups, size=values // groups, x_row=values, gate_row=row, gate_first=norm.gate_first,
            sigmoid=norm.sigmoid, rounds=norm.rounds, weight=mixer.factor.data_ptr(), x=at.mixed, gate=gate, y=at.q,
        )  # fmt: skip
        return at.q

    def _add_own_input(self, layer: DenseLayer, of: OwnInput, y: _Place, at: _LayerResults) -> _Place:
        """Adds the sum of the residual and y, into the residual's place, and what the layer's own input adds to it. Returns where that is."""
        x = self._norm_of_sum(layer, None, at.total, y, at.residual, at.normed)
        width, hidden = of.gate.out_features, layer.o.out_features
        self._product(of.gate, x, at.gated, width, at)
        self._gate(of.activation, width, x_row=_Now.OWN_ROW, gate_row=width, x=_Now.OWN, gate=at.gated, y=at.gated)
        self._quantized = None  # the numbers at `gated` before
        self._product(of.projection, at.gated, at.more, hidden, at)
        return self._norm_of(of.norm, at.more, at.normed)

    def _take_wanted(self, layer: DenseLayer, residual: _Place, at: _LayerResults) -> tuple[int, int]:
        """Adds copies of the wanted rows of the residual and of attention's output, of which kernels that follow run. Returns where they are."""
        self._rows = _Now.OUT_ROWS
        taken = ((residual, at.total, layer.o.out_features), (at.mixed, at.q, layer.o.in_features))
        for table, to, size in taken:
            self._add(
                Call(library().batchgen_take_rows, RowTable(threads=self._threads)),
                rows=_Now.OUT_ROWS, table_rows=_Now.ROWS, bytes=size * self._dtype.itemsize, table=table, indices=_Now.WANTED, y=to,
            )  # fmt: skip
        return at.total, at.q

    def _product(self, of: Linear, x: _Place, y: int, y_row: int, at: _LayerResults) -> None:
        """Adds a linear layer of the rows at x, into rows at y that begin `y_row` numbers apart."""
        fields: dict[str, int] = {}
        if of.adapter is not None:
            self._product(of.adapter.down, x, at.low, of.adapter.down.out_features, at)
            fields = {"low": at.low}
        if isinstance(of, Int8Linear):
            self._quantize(x, of.in_features, of.rounding)
            self._add(of.product(self._in_8_bits, 0, y, y_row), rows=self._rows, **fields)
        else:
            x_row = of.in_features * of.dtype.itemsize // 4
            self._add(of.product(0, 0, x_row, y, y_row), rows=self._rows, x=x, **fields)

    def _quantize(self, x: _Place, size: int, rounding: Rounding) -> None:
        """Adds the rows at x in 8 bits, if they are not made yet."""
        if self._quantized == (x, rounding):
            return
        self._add(
            Call(kernel("quantize", self._dtype), QuantizeArguments(threads=self._threads)),
            rows=self._rows, size=size, x_row=size, q_row=row_length(size), rounding=rounding, x=x,
            q=self._in_8_bits.values.data_ptr(), scales=self._in_8_bits.scales.data_ptr(),
        )  # fmt: skip
        self._quantized = x, rounding

    def _norm_of(self, of: FusedNorm | None, x: _Place, y: int, read: Linear | None = None) -> _Place:
        """Adds the norm of the rows at x, into y. Returns where the result is: x without a norm. `read`: the layer that reads it."""
        if of is None:
            return x
        self._norm(of, 1, len(of.factor), len(of.factor), read, x=x, y=y)
        return y

    def _norm_of_sum(
        self,
        layer: DenseLayer,
        of: FusedNorm | None,
        x: _Place,
        more: _Place,
        total: _Place,
        y: _Place,
        read: Linear | None = None,
        times: float = 1.0,
        each: torch.Tensor | None = None,
    ) -> _Place:
        """Adds a layer's sum of the rows at x and `more`, into `total`, and its norm, into y. Returns where the result is: `total` without a norm."""
        size, to = layer.o.out_features, None if of is None else y
        scale = {"by": layer.by, "times": times, "each": address_of(each)}
        self._norm(of, 1, size, size, read, x=x, more=more, sum=total, y=to, **scale)
        return total if of is None else y

    def _norm(
        self,
        of: FusedNorm | None,
        inner: int,
        size: int,
        x_row: int,
        read: Linear | None = None,
        **given: Any,
    ) -> None:
        """Adds a kernel for norms of `inner` rows of `size` numbers in each of `x_row`, and for sums. `given`: other fields of its argument."""
        fields: dict[str, Any] = {"x_inner": size} | given
        if of is not None:
            fields |= {
                "rounds_first": of.rounds_first,
                "eps": of.eps,
                "weight": of.factor.data_ptr(),
                "shift": address_of(of.shift),
            }
            self._quantized = None  # the numbers at y before
            if isinstance(read, Int8Linear):
                rows = self._in_8_bits
                fields |= {"q": rows.values.data_ptr(), "scales": rows.scales.data_ptr()}
                fields |= {"q_row": row_length(size), "rounding": read.rounding}
                self._quantized = given["y"], read.rounding
        self._add(
            Call(kernel("norm", self._dtype), NormArguments(threads=self._threads)),
            outer=self._rows, inner=inner, size=size, x_outer=x_row, **fields,
        )  # fmt: skip

    def _rotary(self, form: RotaryForm, heads: tuple[Heads, Heads], to: tuple[Heads, Heads]) -> None:
        """Adds the rotary embeddings of queries and keys, into `to`, which may be the same memory."""
        q, k = heads
        cos_dtype, turned, cos_row = self._of_cos
        turn = kernel("rotary", self._dtype, "" if cos_dtype == self._dtype else "_by_float32")
        self._add(
            Call(turn, RotaryArguments(threads=self._threads)),
            tokens=_Now.ROWS, q_heads=q.heads, k_heads=k.heads, size=q.size, turned=turned, q_token=q.to_token, q_head=q.to_head,
            k_token=k.to_token, k_head=k.to_head, cos_token=cos_row, pairs=form.pairs, q=q.at, k=k.at, cos=_Now.COS, sin=_Now.SIN,
            q_out=to[0].at, k_out=to[1].at,
        )  # fmt: skip
