"""Makes a transformers model run packed steps (`prepare`).

It gives the model batchgen's attention, changes the parts of some architectures that take a batch for one text, and learns the shapes of the KV
and the states by running two tokens.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from batchgen.attention.base import EVERY_KEY, NAME, EveryKey, LayerOptions, register
from batchgen.attention.kv_cache import LayerShape
from batchgen.errors import ModelError
from batchgen.kernels.decoder_layers import fuse_layers, narrow_layers
from batchgen.kernels.device_parts import fuse_on_device
from batchgen.kernels.fusion import fuse_linear, fuse_small_parts
from batchgen.kernels.int8 import stay_packed
from batchgen.kernels.replacing import Around, Packing
from batchgen.kernels.whole_vectors import fill_activations
from batchgen.model.architectures import INDEXED, RECURRENT, VERIFIED_ON
from batchgen.model.loaded_model import AttentionKind, LoadedModel, logits_at
from batchgen.model.long_rope import settle_frequencies
from batchgen.model.own_attention import StepInputs, hand_over
from batchgen.prompts.tokenizer import quiet, text_config
from batchgen.state.mixers import RecurrentLayers, StateProbe, install
from batchgen.state.state_size import num_states


def prepare(
    module: Any,
    notes: tuple[str, ...] = (),
    kernels: ctypes.CDLL | None = None,
    compile: str = "auto",
    *,
    int8: bool = False,
    around: Around = nullcontext,
) -> LoadedModel:
    """Gives a model batchgen's attention and, if there are any, kernels. Raises `ModelError`.

    `int8`: `quantize` follows. It replaces the linear layers, which are packed before only if `stay_packed` holds, and fills the activations.
    `around`: returns the context in which a part is packed.
    """
    register()
    if not hand_over(module) and module.config._attn_implementation != NAME:
        with quiet():  # transformers warns of the vision part, which is not there
            module.set_attn_implementation(NAME)
    module.eval()
    device = module.get_input_embeddings().weight.device
    spread = len({parameter.device for parameter in module.parameters()}) > 1
    on_device = device.type == "cuda" and not spread and compile != "on"  # torch.compile has kernels of its own
    recurrent = install(module)
    long_rope = settle_frequencies(module)
    pack_linear = not int8 or stay_packed(module.parameters())
    _change_parts(module, fuse=kernels is not None, pack_linear=pack_linear, around=around, on_device=on_device)
    probe, states, vocab_size = _probe(module, recurrent, device, spread)
    _check_layers(module, probe, states)
    sizes = [kind.sliding_window for kind in probe.kinds if kind.sliding_window is not None]
    narrowed = None if kernels is None else narrow_layers(module, probe.layers, states.layers)
    if kernels is not None and not int8:
        fill_activations(module)
    return LoadedModel(
        module=module,
        device=device,
        dtype=probe.dtype if probe.layers else module.get_input_embeddings().weight.dtype,
        layers=probe.layers,
        vocab_size=vocab_size,
        states=states.layers,
        recurrent=recurrent,
        group=max((kind.group for kind in probe.kinds), default=1),
        kinds=tuple(probe.kinds),
        sliding_window=max(sizes) if sizes and len(sizes) == len(probe.kinds) else None,
        spread=spread,
        kernels=kernels,
        narrowed_from=narrowed,
        long_rope=long_rope,
        compile=compile,
        notes=notes,
    )


def _change_parts(module: Any, *, fuse: bool, pack_linear: bool, around: Around, on_device: bool) -> None:
    """Changes the parts of some architectures that take a batch for one text. With `fuse`, kernels replace the parts that they can replace; with
    `on_device`, kernels for a GPU."""
    _number_shared_attention(module)
    if fuse:
        fuse_small_parts(module)
        if pack_linear:
            fuse_linear(module, Packing(around))
    if on_device:
        fuse_on_device(module)
    _scale_by_position(module)
    _pass_on_to_attention(module)
    _see_every_key(module)
    _number_halves(module)
    if fuse:
        fuse_layers(module, around)


def _check_layers(module: Any, probe: _Probe, states: StateProbe) -> None:
    """Raises `ModelError` if a recurrent layer has not stored a state, or if no layer has stored anything."""
    config = text_config(module.config)
    wanted = num_states(config) if config.model_type in RECURRENT else 0
    if wanted and len(states.layers) != wanted:
        raise ModelError(
            f"of {wanted} recurrent layers of {type(module).__name__} only {len(states.layers)} run as they should: this version of "
            "transformers has other code for them",
            f"install transformers {VERIFIED_ON[-1]}",
        )
    if not probe.layers and not states.layers:
        raise ModelError(f"{type(module).__name__} never calls attention")


def _scale_by_position(module: torch.nn.Module) -> None:
    """Llama 4 scales queries by their position (https://arxiv.org/abs/2501.19399), which it would count from the start of the batch. Makes
    `attention_forward` scale them by their position in the text instead, in layers without rotary embeddings."""
    parts = (part for part in module.modules() if hasattr(part, "floor_scale"))
    found: list[Any] = [part for part in parts if getattr(part, "attn_temperature_tuning", False)]
    if found:
        step = StepInputs(module)
    for attention in found:
        attention.attn_temperature_tuning = False
        if not attention.use_rope:
            attention.query_scale = partial(_scaled, step, attention.floor_scale, attention.attn_scale)


def _scaled(step: StepInputs, floor: float, scale: float, query: torch.Tensor) -> torch.Tensor:
    """Returns queries [1, H, T, D], scaled in float32, in their own type."""
    positions = step.positions.to(query.device).float()
    factors = torch.log1p(torch.floor((positions + 1.0) / floor)) * scale + 1.0
    return (query * factors[:, None, :, None]).to(query.dtype)


def _pass_on_to_attention(module: torch.nn.Module) -> None:
    """The layers of Nemotron and StableLM pass only arguments that they know to their attention. A hook hands it the step's attention."""
    names = ("NemotronDecoderLayer", "StableLmDecoderLayer")
    found: list[Any] = [part for part in module.modules() if type(part).__name__ in names]
    if found:
        step = StepInputs(module)
    for layer in found:
        layer.self_attn.register_forward_pre_hook(step.pass_on, with_kwargs=True)


def _see_every_key(module: torch.nn.Module) -> None:
    """Removes the indexers that choose which keys a query sees (DeepSeek V3.2). Contexts end before an indexer would leave any out
    (`prompts/tokenizer.py`). `EVERY_KEY` stands in for its choice, and for the masks that layers make of it.
    """
    part: Any
    for part in list(module.modules()):
        # Layers without an indexer use the choice of an earlier layer's.
        if getattr(getattr(part, "config", None), "model_type", None) in INDEXED and hasattr(part, "indexer"):
            if part.indexer is not None:
                part.indexer = _ChoosesAll()
            if hasattr(part, "build_attention_mask_from_topk"):  # GLM 5 Next
                part.build_attention_mask_from_topk = lambda **_: EVERY_KEY
            part.register_forward_pre_hook(
                lambda _, args, kwargs: (args, kwargs | {"attention_mask": EVERY_KEY}), with_kwargs=True
            )


def _number_halves(module: Any) -> None:
    """The attention of DiffLlama runs twice, for each half of the values. Gives each time a layer number of its own, for its KV."""
    attention: Any
    for attention in module.modules():
        if type(attention).__name__ == "DiffLlamaAttention":
            attention.layer_number = _Halves(attention.layer_idx, module.config.num_hidden_layers)
            attention.register_forward_pre_hook(attention.layer_number.begin)


class _Halves:
    """The layer numbers of attention that runs twice: the layer's index, then that plus the number of layers."""

    def __init__(self, layer: int, layers: int) -> None:
        self._layer, self._layers = layer, layers
        self._times = 0

    def begin(self, _: Any, args: Any) -> None:
        """Hook before the layer's attention runs."""
        self._times = 0

    def __call__(self) -> int:
        self._times += 1
        return self._layer + (self._times - 1) * self._layers


class _ChoosesAll(torch.nn.Module):
    """Stands in for an indexer."""

    def forward(self, *_: Any, **__: Any) -> EveryKey:
        return EVERY_KEY


def _number_shared_attention(module: torch.nn.Module) -> None:
    """Gives attention that layers of Zamba and Zamba2 share the index of its layer, which transformers passes only with each call."""
    for layers in module.modules():
        if isinstance(layers, torch.nn.ModuleList):
            for i, layer in enumerate(layers):
                shared: Any = getattr(layer, "shared_transformer", getattr(layer, "shared_transf", None))
                if shared is not None:
                    shared.self_attn.layer_idx = i


class _Probe:
    """Stands in for a step's attention: records each layer's shapes and computes plain attention."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self._given: dict[tuple[Any, ...], tuple[int, torch.Tensor, torch.Tensor]] = {}
        """By their places in memory: the first layer that had these keys and values, which are kept, so that no others come to lie there."""
        self.kinds: dict[AttentionKind, None] = {}
        self.dtype = torch.float32

    def __call__(
        self, layer: int, q_HTD: torch.Tensor, k_KTD: torch.Tensor, v_KTV: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        if layer in self.layers:
            raise ModelError(f"the model runs attention twice in layer {layer}, which is not supported")
        place = tuple((x.data_ptr(), x.shape, x.stride()) for x in (k_KTD, v_KTV))
        first, *_ = self._given.setdefault(place, (layer, k_KTD, v_KTV))
        same_as = None if first == layer else first
        self.layers[layer] = LayerShape(k_KTD.shape[0], k_KTD.shape[2], v_KTV.shape[2], v_KTV.device, same_as)
        self.dtype = v_KTV.dtype
        group = q_HTD.shape[0] // k_KTD.shape[0]
        kind = AttentionKind(
            k_KTD.shape[0], group, k_KTD.shape[2], v_KTV.shape[2], q_HTD.dtype, options.scale, options.sliding_window, options.softcap,
            None if options.sinks is None else options.sinks.dtype,
        )  # fmt: skip
        self.kinds[kind] = None
        k, v = k_KTD.repeat_interleave(group, 0), v_KTV.repeat_interleave(group, 0)
        out = torch.nn.functional.scaled_dot_product_attention(q_HTD, k, v, is_causal=True, scale=options.scale)
        return out.transpose(0, 1)


@torch.inference_mode()
def _probe(
    module: Any, recurrent: RecurrentLayers | None, device: torch.device, spread: bool
) -> tuple[_Probe, StateProbe, int]:
    """Runs two tokens. Returns the shapes of what the layers store, and the width of the logits."""
    tokens = torch.tensor([[0, 1]], device=device)
    for again in (True, False):
        probe, states = _Probe(), StateProbe()
        with recurrent.running(states) if recurrent is not None else nullcontext():
            output = module(
                input_ids=tokens, position_ids=tokens, use_cache=False, step_attention=probe,
                logits_to_keep=logits_at(np.array([1]), device, spread),
            )  # fmt: skip
        if output.logits.shape[:2] == (1, 1):
            return probe, states, output.logits.shape[-1]
        if again:
            module.get_output_embeddings().register_forward_pre_hook(StepInputs(module).choose)
    raise ModelError(f"{type(module).__name__} cannot give the logits of chosen tokens alone")
