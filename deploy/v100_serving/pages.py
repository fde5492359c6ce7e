"""The KV page that vLLM 0.19.1 chooses for a profile, and how many blocks a request takes.

In a hybrid model one block pool serves attention layers and GDN layers: an attention page is made
as large as the state of a GDN layer (`HybridAttentionMambaModelConfig`), the layers are split into
groups of equal size (`_get_kv_cache_groups_uniform_page_size`), and a block of the pool is one page
for each layer of a group. All sizes are bytes of one tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from v100_serving.profiles import DTYPE_BYTES, Profile

KERNEL_BLOCK_TOKENS = 16
"""Page sizes are multiples of this many tokens."""


def ceil_div(a: int, b: int) -> int:
    """The least integer that is at least a / b."""
    return -(-a // b)


@dataclass(frozen=True)
class KvPages:
    """Pages of one rank.

    Attributes:
        bytes_per_token: K and V of one token in one attention layer.
        state_bytes: conv and recurrent state of one GDN layer, drafts included; 0 without GDN.
        block_tokens: tokens of one attention page.
        page_bytes: bytes of one page, the same for attention and GDN layers.
        layers_per_group: pages that one block of the pool consists of.
        attention_groups, state_groups: KV cache groups of each kind.
        state_blocks_per_request: blocks that one request holds in each GDN group.
    """

    bytes_per_token: int
    state_bytes: int
    block_tokens: int
    page_bytes: int
    layers_per_group: int
    attention_groups: int
    state_groups: int
    state_blocks_per_request: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool (one page for each layer of a group)."""
        return self.page_bytes * self.layers_per_group

    def blocks(self, tokens: int) -> int:
        """Blocks of the pool that one request with `tokens` tokens of context needs at most."""
        return (
            self.attention_groups * ceil_div(tokens, self.block_tokens)
            + self.state_groups * self.state_blocks_per_request
        )


def kv_pages(profile: Profile) -> KvPages:
    """The pages of one rank of `profile`. Its head counts must divide (see `plan_memory`)."""
    geometry, engine, tp = profile.model.geometry, profile.engine, profile.engine.tensor_parallel
    stages = engine.pipeline_parallel
    kv_heads = max(1, geometry.kv_heads // tp)  # fewer heads than ranks: each rank holds a copy
    bytes_per_token = 2 * kv_heads * geometry.head_dim * profile.kv_element_bytes
    attention = ceil_div(geometry.full_attention_layers, stages) + geometry.draft_attention_layers
    if geometry.gdn is None:
        block = engine.block_size or KERNEL_BLOCK_TOKENS
        return KvPages(bytes_per_token, 0, block, block * bytes_per_token, attention, 1, 0, 0)

    gdn, drafts = geometry.gdn, profile.draft_tokens
    conv_channels = (2 * gdn.key_heads * gdn.key_dim + gdn.value_heads * gdn.value_dim) // tp
    conv = conv_channels * (gdn.conv_kernel - 1 + drafts) * DTYPE_BYTES[gdn.conv_dtype]
    recurrent = gdn.value_heads // tp * gdn.key_dim * gdn.value_dim * DTYPE_BYTES[gdn.state_dtype]
    state = conv + recurrent
    step = KERNEL_BLOCK_TOKENS
    block = max(step * ceil_div(state, step * bytes_per_token), engine.block_size or 0)

    recurrent_layers = ceil_div(gdn.layers, stages)
    few, many = sorted((attention, recurrent_layers))
    group = many if many < 1.5 * few else few
    return KvPages(
        bytes_per_token=bytes_per_token,
        state_bytes=state,
        block_tokens=block,
        page_bytes=block * bytes_per_token,
        layers_per_group=group,
        attention_groups=ceil_div(attention, group),
        state_groups=ceil_div(recurrent_layers, group),
        # `align` mode (prefix caching) keeps the last state as well as the running one
        state_blocks_per_request=(2 if engine.prefix_caching else 1) + drafts,
    )
