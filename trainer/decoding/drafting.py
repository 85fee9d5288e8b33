"""A drafter at work on one text: keys and values of its context are kept from round to round.

The same layers as in `trainer.drafter`, one block at a time.

S tokens of the context   N new ones   K block size   P = K-1 drafted slots   V vocabulary
D hidden size   F fused width   G key heads   H head size
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from shared.decoder import Decoder
from shared.errors import NonFiniteError
from trainer.drafter import Drafter, Layer
from trainer.rotary import Angles, rotary_angles, rotate


class Drafting:
    """The context is what the target has run on: all of the text but its newest token."""

    def __init__(self, drafter: Drafter, decoder: Decoder) -> None:
        """Begin with an empty context.

        Args:
            drafter: on the device and of the type of the target.
            decoder: of the target; lends its embedding and LM head.
        """
        self._drafter = drafter
        self._decoder = decoder
        self._head_dim = drafter.config.head_dim
        self._num_context = 0
        self._context: list[tuple[Tensor, Tensor] | None] = [None] * len(drafter.layers)

    @torch.inference_mode()
    def extend(self, features_NF: Tensor) -> None:
        """Take in the target's states of the next tokens of the text."""
        drafter = self._drafter
        fused_ND = drafter.hidden_norm(drafter.fc(features_NF))
        angles = self._angles(len(fused_ND), fused_ND)
        for number, layer in enumerate(drafter.layers):
            new = self._keys_values(layer, fused_ND, angles)  # type: ignore[arg-type]
            old = self._context[number]
            self._context[number] = (
                new if old is None else (torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]]))
            )
        self._num_context += len(fused_ND)

    @torch.inference_mode()
    def logits(self, token_id: int) -> Tensor:
        """Of the slots that follow `token_id`, the text's newest token: [P, V].

        Raises:
            NonFiniteError: one is NaN or infinity.
        """
        drafter, config = self._drafter, self._drafter.config
        ids_K = torch.full((config.block_size,), config.mask_token_id)
        ids_K[0] = token_id
        weight_VD = self._decoder.embedding.weight
        assert isinstance(weight_VD, Tensor)
        # The plain rows: some targets scale what they look up, drafters are trained without.
        hidden_KD = embedding(ids_K.to(weight_VD.device), weight_VD).to(drafter.fc.weight.dtype)
        angles = self._angles(config.block_size, hidden_KD)
        for layer, context, slides in zip(
            drafter.layers, self._context, config.slides, strict=True
        ):
            assert context is not None
            assert isinstance(layer, Layer)
            mask = self._window(config.sliding_window, hidden_KD.device) if slides else None
            hidden_KD = self._run(layer, hidden_KD, context, angles, mask)
        logits_PV: Tensor = self._decoder.lm_head(drafter.norm(hidden_KD[1:]))
        if not bool(logits_PV.amax(-1).isfinite().all()):
            dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
            raise NonFiniteError(
                f"the drafter's logits are not finite in {dtype}. Give --dtype bfloat16, float32, "
                "or another checkpoint."
            )
        return logits_PV

    def _run(
        self,
        layer: Layer,
        hidden_KD: Tensor,
        context: tuple[Tensor, Tensor],
        angles: Angles,
        mask: Tensor | None,
    ) -> Tensor:
        attention = layer.self_attn
        normed_KD = layer.input_layernorm(hidden_KD)
        query_KNH = attention.q_proj(normed_KD).view(len(normed_KD), -1, self._head_dim)
        query_KNH = rotate(attention.q_norm(query_KNH), angles)
        key_KGH, value_KGH = self._keys_values(layer, normed_KD, angles)
        mixed_NKH = scaled_dot_product_attention(
            query_KNH.transpose(0, 1)[None],
            torch.cat([context[0], key_KGH]).transpose(0, 1)[None],
            torch.cat([context[1], value_KGH]).transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )[0]
        hidden_KD = hidden_KD + attention.o_proj(mixed_NKH.transpose(0, 1).flatten(1))
        out_KD: Tensor = hidden_KD + layer.mlp(layer.post_attention_layernorm(hidden_KD))
        return out_KD

    def _keys_values(self, layer: Layer, x_ND: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys, normed and turned, and values, [N, G, H] each."""
        attention = layer.self_attn
        key_NGH = attention.k_proj(x_ND).view(len(x_ND), -1, self._head_dim)
        value_NGH = attention.v_proj(x_ND).view(len(x_ND), -1, self._head_dim)
        return rotate(attention.k_norm(key_NGH), angles), value_NGH

    def _angles(self, count: int, like: Tensor) -> Angles:
        """Of the `count` positions that follow the context."""
        begin = self._num_context
        position = torch.arange(begin, begin + count, device=like.device)
        return rotary_angles(position, self._drafter.config, like.dtype)

    def _window(self, window: int | None, device: torch.device) -> Tensor:
        """Which keys a slot of a sliding layer sees: bool [K, S + K]."""
        assert window is not None
        key = torch.arange(self._num_context + self._drafter.config.block_size, device=device)
        reach = key[self._num_context :, None] - key
        return (reach >= 0) & (reach < window)
