"""What the start-up log says of an engine: mesh, memory, kernels, where prefixes can hit, how drafts are made."""

from dcpjax import capacity
from dcpjax.host.report import DeviceState
from dcpjax.runner import Runner
from models.stored import bytes_per_device


def describe(runner: Runner, prefix_caching: bool = True) -> list[str]:
    """Lines for a log. Bytes a token are told twice: by the formula of the layout, and as the pools are allocated."""
    plan, layout = runner.net.plan, runner.cache.latent.layout
    weights = bytes_per_device(runner.params)
    allocated = bytes_per_device((runner.cache, runner.draft_cache))
    tokens = (layout.num_pages - 1) * layout.page_tokens
    return [
        "devices: " + ", ".join(str(device) for device in plan.mesh.devices.flat),
        (
            f"mesh: {plan.tp} × {plan.dcp} (groups × dcp ranks); weights {weights / 1e6:,.1f} MB a device, "
            f"{'whole experts on a device each' if plan.expert_parallel else 'a part of each expert on every device'}"
        ),
        (
            f"cache: {layout.num_pages} pages of {layout.page_tokens} tokens, {layout.page_rows} of them on a rank; index keys "
            f"in {runner.cache.index.layout.shards} shard(s)"
        ),
        (
            f"cache: {bytes_per_token(runner):,.1f} bytes a token and rank by formula, "
            f"{allocated / layout.num_slots:,.1f} as allocated ({allocated / 1e6:,.1f} MB a device)"
        ),
        (
            f"cache: holds {tokens:,} tokens, {tokens / runner.max_model_len:.2f} × the longest sequence of "
            f"{runner.max_model_len:,}"
        ),
        f"kernels: {runner.net.options.kernels.describe()}",
        _prefixes(layout.page_tokens) if prefix_caching else "prefix caching: off",
        _drafts(runner),
    ]


def device_state(runner: Runner, compile_seconds: float) -> DeviceState:
    """What the runner's devices hold now."""
    held = bytes_per_device((runner.params, runner.cache, runner.draft_cache))
    devices = runner.net.plan.mesh.devices.flat
    memory = {str(device): (device.memory_stats() or {}).get("bytes_in_use", held) for device in devices}
    return DeviceState(runner.num_compiled, compile_seconds, memory)


def bytes_per_token(runner: Runner) -> float:
    """Bytes of one token on one rank, all pools, by the formula of `CacheShape`."""
    draft = runner.draft_cache
    layout = "sharded" if draft is None or draft.latent.layout.shards > 1 else "replicated"
    latent = runner.cache.latent
    shape = capacity.cache_shape(
        runner.net.cfg,
        runner.net.plan,
        latent.data.dtype.name if latent.record.packed is None else "fp8",
        runner.cache.index.layout.shards,
        layout,
    )
    return shape.bytes_per_token()


def _prefixes(page_tokens: int) -> str:
    return (
        f"prefix caching: hits come in pages of {page_tokens} tokens, at any dcp and number of drafts; prompts of "
        f"{page_tokens} tokens and more can hit"
    )


def _drafts(runner: Runner) -> str:
    spec = runner.spec
    if spec is None:
        return "drafts: none"
    shards = runner.draft_cache.latent.layout.shards
    layout = f"in {shards} shards" if shards > 1 else "whole on every rank"
    line = f"drafts: {'up to ' if spec.adaptive else ''}{spec.num_drafts} a step, acceptance {spec.acceptance}, their cache "
    line += layout
    if spec.pin is not None:
        line += f"; ACCEPTANCE IS PINNED to a mean length of {spec.pin}: the texts are not the model's"
    return line
