"""Round by round, with its context kept, the drafter computes what it was trained to."""

import torch
from torch.nn import functional

from shared.decoder import Decoder
from tests.test_trainer.test_decoding.targets import llama
from trainer.attention import build_mask
from trainer.decoding.drafting import Drafting
from trainer.drafter import Drafter
from trainer.recipe import DrafterConfig, RopeScaling

BLOCK = 6


def test_a_block_is_that_of_a_whole_forward() -> None:
    config = DrafterConfig(
        mask_token_id=3,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
        rope_scaling=RopeScaling(rope_type="linear", factor=2.0),
        num_layers=3,
        block_size=BLOCK,
        layer_types=("full_attention", "sliding_attention", "sliding_attention"),
        sliding_window=4,  # shorter than the block, and than what was there before
    )
    model = llama()
    decoder = Decoder.find(model)
    drafter = Drafter(config, 32, 2 * 32, torch.Generator().manual_seed(0))
    features = torch.randn((17, 64), generator=torch.Generator().manual_seed(1))
    drafting = Drafting(drafter, decoder)
    begin = 0
    for end in (9, 10, 17):
        drafting.extend(features[begin:end])
        token = 5 + end
        logits = drafting.logits(token)
        row = (torch.zeros(end + 1, dtype=torch.int64), torch.tensor([end]), torch.tensor([True]))
        with torch.no_grad():
            ids = torch.tensor([token, *[3] * (BLOCK - 1)])
            hidden = drafter(
                torch.cat([features[:end], torch.zeros(1, 64)]),  # the anchor's are not seen
                functional.embedding(ids, model.get_input_embeddings().weight),
                torch.arange(end + 1),
                torch.arange(end, end + BLOCK),
                build_mask(*row, BLOCK),
                build_mask(*row, BLOCK, 4),
            )
            expected = model.lm_head(hidden[1:])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        begin = end
