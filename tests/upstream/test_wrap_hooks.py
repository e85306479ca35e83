"""Lists of hooks of Megatron-Bridge's providers."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("wrap_hooks")
PROVIDER = "megatron.bridge.models.model_provider"


def test_remove_hooks_removes_only_given_hooks():
    for kind in ("pre_wrap", "post_wrap"):
        CONTRACT.takes(PROVIDER, f"ModelProviderMixin.register_{kind}_hook", "self", "hook", "prepend")
        CONTRACT.mentions(PROVIDER, f"ModelProviderMixin.register_{kind}_hook", f"_{kind}_hooks")
    from qwen3vl_bridge.upstream.wrap_hooks import pre_wrap_hooks, remove_hooks

    from megatron.bridge.models.gpt_provider import GPTModelProvider

    provider = GPTModelProvider(num_layers=1, hidden_size=2, num_attention_heads=1)
    assert pre_wrap_hooks(provider) == ()
    hooks = [lambda chunks: chunks for _ in range(3)]
    provider.register_pre_wrap_hook(hooks[0])
    provider.register_pre_wrap_hook(hooks[1])
    provider.register_post_wrap_hook(hooks[2])
    assert pre_wrap_hooks(provider) == tuple(hooks[:2])
    remove_hooks(provider, before=hooks[0], after=hooks[2])
    assert pre_wrap_hooks(provider) == (hooks[1],)
    if provider.post_wrap_hook is not None:
        CONTRACT.fail(PROVIDER, f"after removal the provider still has {provider.post_wrap_hook}")
