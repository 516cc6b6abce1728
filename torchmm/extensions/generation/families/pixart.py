"""Families of diffusion transformers, and their split into pre, layers and post.

A family defines the diffusers class of the transformer, the computation before its layers, the call
of a layer and the output after the last layer. In addition to hidden states and context, a layer
requires only the embedded time, which is one tensor that stages send to each other.

A video is one sequence of the patches of all its frames. For one frame, a family computes exactly
the same as its diffusers class. The forward methods of these classes are not used, because a stage
could not start between layers, and they support only images.

This folder requires diffusers (`pip install -e '.[generation]'`). No other folder requires it.

Shape legend: N images, P patches of one image, L context tokens of one image, D features, V values
of a patch (channels x rows x columns), E features of an embedded time.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, PixArtTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.embeddings import (
    get_1d_sincos_pos_embed_from_grid,
    get_2d_sincos_pos_embed,
)
from torch import Tensor, nn
from torch.nn import functional

from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.extensions.generation.families.autoencoder import (
    build_autoencoder,
    build_encoder_and_decoder,
)
from torchmm.extensions.generation.latents import LatentDecoder, LatentEncoder, LatentSpec

TIME_SCALE = 1000.0
"""Maximum time in transformers of diffusers."""
NARROW_STD = 0.02
FFN_SIZE = "ffn_size"
"""Additional config key of torchmm: width of the feed-forward layers.

Feed-forward layers of the class have 4 times the hidden size, so diffusers alone cannot load a
model with a different width.
"""


class OutputTable(nn.Module):
    """Shift and scale (2, D) of the output, which diffusers does not store in a submodule.

    As a submodule, it can be part of the last stage, like all modules after the layers.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.empty(2, size, dtype=dtype))


def _is_gated(config: dict[str, Any]) -> bool:
    return config["activation_fn"] in ("geglu", "swiglu")


class PixArtFamily:
    """PixArt (arXiv 2310.00426): a DiT with cross attention and one time embedding for all layers.

    Its patches are pixels, or latents of an autoencoder.
    """

    layers = "transformer_blocks"
    pre: tuple[str, ...] = ("pos_embed", "adaln_single")
    post: tuple[str, ...] = ("norm_out", "proj_out")
    tensor_scopes: tuple[str, ...] = ("attn1", "attn2", "ff")

    def complete(
        self, config: dict[str, Any], llm_hidden_size: int, channels: int = 3
    ) -> dict[str, Any]:
        """Return the complete config, with values that follow from the LLM and the target.

        Args:
            config: Config of the recipe.
            llm_hidden_size: Hidden size of the LLM.
            channels: Number of channels of pixels or latents.

        Raises:
            ConfigError: The config has unknown keys or unsupported values.
        """
        known = inspect.signature(PixArtTransformer2DModel.__init__).parameters
        written = {k: v for k, v in config.items() if not k.startswith("_")}
        problems = []
        for key in written.keys() - (known.keys() - {"self"}) - {FFN_SIZE}:
            similar = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            problems.append(f"{key!r} is not a key of PixArtTransformer2DModel{hint}")
        full = {name: p.default for name, p in known.items() if name != "self"} | written
        width = full["num_attention_heads"] * full["attention_head_dim"]
        following = {
            "in_channels": channels,
            "out_channels": channels,
            "cross_attention_dim": width,
            "caption_channels": llm_hidden_size,
            "use_additional_conditions": False,
            "dropout": 0.0,
        }
        for key, value in following.items():
            if key in written and written[key] not in (value, None) and key != "caption_channels":
                problems.append(f"{key} = {written[key]}, but it must be {value}; remove it")
        if full["sample_size"] % full["patch_size"]:
            problems.append(
                f"sample_size = {full['sample_size']} is not a multiple of patch_size = "
                f"{full['patch_size']}"
            )
        if not isinstance(size := full.get(FFN_SIZE, 1), int) or size < 1:
            problems.append(f"{FFN_SIZE} = {size!r}: must be an integer >= 1")
        if width % 4:
            problems.append(
                f"num_attention_heads x attention_head_dim = {width}: must be a multiple of 4"
            )
        if problems:
            raise ConfigError([f"[model.generator] config: {p}" for p in problems])
        return full | following

    def build(self, config: dict[str, Any], dtype: torch.dtype) -> Any:
        """Return the complete transformer."""
        # The `to` of diffusers is not used. It warns of modules in float32, which FSDP handles.
        dit: Any = PixArtTransformer2DModel(**{k: v for k, v in config.items() if k != FFN_SIZE})
        if size := config.get(FFN_SIZE):
            kind = config["activation_fn"]
            for layer in dit.transformer_blocks:
                layer.ff = FeedForward(dit.inner_dim, activation_fn=kind, inner_dim=size)
            dit.register_to_config(**{FFN_SIZE: size})
        return nn.Module.to(dit, dtype=dtype)

    def build_encoder_and_decoder(
        self, spec: LatentSpec, dtype: torch.dtype
    ) -> tuple[LatentEncoder, LatentDecoder]:
        """Return encoder and decoder of the autoencoder of the transformer."""
        return build_encoder_and_decoder(spec, dtype)

    def autoencoder(self, spec: LatentSpec, dtype: torch.dtype) -> Any:
        """Return the complete diffusers autoencoder."""
        return build_autoencoder(spec.config, dtype)

    def detach_connector(self, dit: Any, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
        """Remove connector and output table from `dit` and return them.

        The remaining modules are prepared for `initialize`.
        """
        connector, dit.caption_projection = dit.caption_projection, None
        del dit.scale_shift_table
        dit.pos_embed.pos_embed = None  # computed for each grid instead
        for layer in dit.transformer_blocks:
            layer.attn2.to_out[0].initial = "zero"
        dit.proj_out.initial = "zero"
        embedder = dit.adaln_single.emb.timestep_embedder
        for linear in (embedder.linear_1, embedder.linear_2, dit.adaln_single.linear):
            linear.initial = "narrow"
        for linear in (connector.linear_1, connector.linear_2):
            linear.initial = "narrow"
        return connector, OutputTable(dit.inner_dim, dtype)

    def initialize(self, module: nn.Module) -> None:
        """Initialize the parameters of one module as in the code of the PixArt authors."""
        if isinstance(module, nn.Linear | nn.Conv2d):
            initial = getattr(module, "initial", "wide")
            if initial == "wide":
                nn.init.xavier_uniform_(module.weight.flatten(1))
            elif initial == "narrow":
                nn.init.normal_(module.weight, std=NARROW_STD)
            else:
                nn.init.zeros_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, OutputTable | BasicTransformerBlock):
            table = module.scale_shift_table
            nn.init.normal_(table, std=table.shape[-1] ** -0.5)
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def positions(self, config: dict[str, Any], grid_thw: tuple[int, int, int]) -> Tensor:
        """Return the position embeddings of the patches of a grid, float32 (P, D).

        Rows and columns have the embeddings of PixArt. Frames of a video have an additional
        sinusoidal embedding of their index, as in Latte (arXiv 2401.03048).
        """
        frames, rows, columns = grid_thw
        width = config["num_attention_heads"] * config["attention_head_dim"]
        sample = config["sample_size"]
        space_PD = get_2d_sincos_pos_embed(
            width,
            (rows, columns),
            base_size=sample // config["patch_size"],
            interpolation_scale=config["interpolation_scale"] or max(sample // 64, 1),
            output_type="pt",  # older versions of diffusers reject their default
        )
        if frames == 1:
            return space_PD.float()
        time_FD = get_1d_sincos_pos_embed_from_grid(width, torch.arange(frames), "pt")
        return (time_FD[:, None] + space_PD[None]).flatten(0, 1).float()

    def embed(self, dit: Any, noisy_NPV: Tensor, positions_NPD: Tensor) -> Tensor:
        """Return the hidden states (N, P, D) before the first layer."""
        proj = dit.pos_embed.proj
        weight = proj.weight.flatten(1)
        hidden = functional.linear(noisy_NPV.to(weight.dtype), weight, proj.bias)
        return hidden + positions_NPD.to(weight.dtype)

    def embed_times(self, dit: Any, times_N: Tensor) -> Tensor:
        """Return the embedded times (N, E) for all layers and the output, with E = 7 D."""
        dtype = dit.adaln_single.linear.weight.dtype
        all_times, last = dit.adaln_single(
            times_N * TIME_SCALE, batch_size=len(times_N), hidden_dtype=dtype
        )
        return torch.cat([all_times, last], dim=-1)

    def run_layer(
        self,
        layer: nn.Module,
        hidden_NPD: Tensor,
        context_NLD: Tensor,
        time_NE: Tensor,
        masks: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Run one layer and return its output (N, P, D).

        Args:
            layer: Transformer layer.
            hidden_NPD: Hidden states.
            context_NLD: Context after the connector.
            time_NE: Embedded times.
            masks: Additive attention masks (N, 1, P) of patches and (N, 1, L) of the context. None
                without padding.
        """
        return layer(
            hidden_NPD,
            attention_mask=masks[0],
            encoder_hidden_states=context_NLD,
            encoder_attention_mask=masks[1],
            timestep=time_NE[:, : 6 * hidden_NPD.shape[-1]],
        )

    def tensor_styles(self, config: dict[str, Any]) -> dict[str, str]:
        """Return the styles by submodule of a layer, see `LayeredModule.tensor_parallel_plan`."""
        columns = {f"{a}.to_{x}": "colwise" for a in ("attn1", "attn2") for x in "qkv"}
        rows = dict.fromkeys(("attn1.to_out.0", "attn2.to_out.0", "ff.net.2"), "rowwise")
        heads = dict.fromkeys(("attn1", "attn2"), "local_heads")
        gated = _is_gated(config)
        inner = {"ff.net.0": "packed_gate_up"} if gated else {"ff.net.0.proj": "colwise"}
        return {**columns, **inner, **rows, **heads, "": "sequence"}

    def finish(self, dit: Any, table: OutputTable, hidden_NPD: Tensor, time_NE: Tensor) -> Tensor:
        """Return the velocities (N, P, V)."""
        last_ND = time_NE[:, 6 * hidden_NPD.shape[-1] :]
        modulation = table.scale_shift_table[None] + last_ND[:, None]
        shift, scale = modulation.chunk(2, dim=1)
        output = dit.proj_out(dit.norm_out(hidden_NPD) * (1 + scale) + shift)
        patch = dit.config.patch_size
        # Within a patch, the class has channels last. Data have channels first, as its input layer.
        return output.unflatten(-1, (patch * patch, -1)).transpose(-1, -2).flatten(-2)

    def describe_layer(self, config: dict[str, Any]) -> LayerDescription:
        """Return the sizes of a layer."""
        heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
        return LayerDescription(
            hidden_size=heads * head_dim,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            ffn_size=config.get(FFN_SIZE) or 4 * heads * head_dim,
            gated_ffn=_is_gated(config),
            packed_gate_up=_is_gated(config),
            causal=False,
            cross_attention=True,
            norm="layer",
            activation=config["activation_fn"],
            rotary=False,
        )

    def flops_per_image(self, dit: Any) -> int:
        """Forward FLOPs of the time embedding."""
        linears = [m for m in dit.adaln_single.modules() if isinstance(m, nn.Linear)]
        return sum(2 * linear.weight.numel() for linear in linears)

    def scheduler(self) -> Any:
        """Return the diffusers scheduler of the trained model. Its sigmas are the times."""
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=int(TIME_SCALE), shift=1.0)


GENERATOR_FAMILIES = {"PixArtTransformer2DModel": PixArtFamily()}
"""Supported families by diffusers class name. A family is supported if its parity test passes."""
