"""Training: its network is the oracle's, its text is the template's, its optimiser does what it says, it runs."""

import functools
import json
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from dcpjax.mesh import make_plan
from dcpjax.text import Tokenizer
from models import dense
from models.config import from_hf, read_config
from models.train import data, gates, generator, network, optim, tables, toolcalls
from models.train.train import TINY, smoke
from models.weights import load

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden" / "a_freq4"


pytestmark = pytest.mark.usefixtures("quick_compile")


@functools.cache
def golden():
    cfg = from_hf(json.loads((GOLDEN / "config.json").read_text()), {"latent_norm_eps": 1e-6})
    with np.load(GOLDEN / "golden.npz") as arrays:
        return cfg, load(GOLDEN, cfg, make_plan(1, 1), jnp.float32), dict(arrays)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_trunk_is_the_oracle_in_both_modes():
    cfg, params, want = golden()
    ids = jnp.asarray(want["input_ids"])
    share = jnp.ones(len(ids))
    sparse = jax.jit(functools.partial(network.trunk, cfg=cfg, sparse=True))(params, ids, teach=share)
    np.testing.assert_allclose(sparse.hidden, want["final_hidden"], atol=2e-4)
    np.testing.assert_allclose(sparse.load.sum(-1), 1, atol=1e-5)
    assert float(sparse.index_loss) > 0
    full = jax.jit(functools.partial(network.trunk, cfg=cfg, sparse=False))(params, ids)
    np.testing.assert_allclose(full.hidden, dense.forward(params, ids, cfg, sparse=False).final_hidden, atol=2e-4)


def test_drafts_are_the_frozen_drafts_of_the_oracle():
    """Fed with the drafts themselves as the text that follows, the last row of the prompt drafts the same again."""
    cfg, params, want = golden()
    size = len(want["input_ids"])
    tokens = jnp.concatenate([want["input_ids"], want["greedy_tokens"][:1], want["draft_share_tokens"]])

    def run(params, tokens):
        return network.drafts(params, tokens, network.trunk(params, tokens, cfg, sparse=True).hidden, cfg, 5).hidden

    hidden = jax.jit(run)(params, tokens)
    np.testing.assert_allclose(hidden[:, size - 1], want["draft_share_hidden"], atol=2e-4)
    np.testing.assert_allclose(hidden[0, : size - 1], want["mtp_hidden"][:-1], atol=2e-4)


def test_top_mask_keeps_the_largest():
    scores = jax.random.normal(jax.random.key(0), (40, 40)).at[3].set(-jnp.arange(40.0))
    visible = jnp.tril(jnp.ones((40, 40), bool))
    mask = network.top_mask(scores, visible, 7)
    want = dense.select(scores, visible, jnp.arange(40), 7).mask
    np.testing.assert_array_equal(mask, want)
    tied = network.top_mask(jnp.zeros((1, 9)), jnp.ones((1, 9), bool), 4)
    assert tied.all()


def test_orthogonalise_leaves_only_directions():
    m = jax.random.normal(jax.random.key(1), (2, 48, 24)) * jnp.array([1e-3, 1e3])[:, None, None]
    singular = np.linalg.svd(np.asarray(optim.orthogonalise(m)) / (0.2 * 48**0.5), compute_uv=False)
    assert 0.5 < singular.min() and singular.max() < 1.35


def test_balance_moves_bias_towards_idle_experts():
    _, params, _ = golden()
    load_ = jnp.tile(jnp.array([0.3, 0.2, 0.125, 0.1, 0.1, 0.1, 0.05, 0.025]), (4, 1))
    moved = optim.balance(params.layers, load_, jnp.float32(1)).moe.router_bias - params.layers.moe.router_bias
    np.testing.assert_array_equal(np.sign(np.round(moved[0], 6)), [-1, -1, 0, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("clear", [True, False])
def test_chats_are_rendered_as_by_the_template(thinking, clear):
    ours, rng = Tokenizer.load(TINY), random.Random(5)
    for i in range(30):
        tools, messages = toolcalls.chat(rng) if i % 3 == 0 else ([], generator.small_talk(rng, 2))
        messages = messages if i % 3 else [*messages, {"role": "user", "content": " and now? "}]
        messages = messages[:-1] if i % 5 == 0 else messages
        effort = "high" if i % 4 == 0 else "max"
        want = ours.apply_chat_template(
            messages, tools or None, enable_thinking=thinking, reasoning_effort=effort, clear_thinking=clear
        )
        got = generator.render(messages, tools, thinking=thinking, effort=effort, clear_thinking=clear, prompt=True)
        assert got == want


def test_layout_of_the_template():
    ours = Tokenizer.load(TINY)
    hello = [{"role": "user", "content": "Hi"}]
    assert (
        ours.apply_chat_template(hello, enable_thinking=False) == "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"
    )
    assert ours.apply_chat_template(hello) == (
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "<|user|>ab<|assistant|>" in ours.apply_chat_template(parts)
    inline = [*hello, {"role": "assistant", "content": "<think>why</think> so "}]
    assert ours.apply_chat_template(inline, add_generation_prompt=False).endswith("<think>why</think>so")


def test_control_tokens_close_the_vocabulary_and_digits_stay_apart(tokenizer):
    assert tokenizer.get_vocab_size() == 3072
    raw = json.loads((TINY / "generation_config.json").read_text())
    assert raw["eos_token_id"] == [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert json.loads((TINY / "config.json").read_text())["eos_token_id"] == raw["eos_token_id"]
    assert raw["eos_token_id"] == [3036, 3043, 3045]
    assert len(tokenizer.encode("907134").ids) == 6
    text = "naïve 東京 \U0001f600\n\tif x:\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    kept = "<think>a</think><tool_call>f<arg_key>k</arg_key><arg_value>1</arg_value></tool_call>"
    assert tokenizer.decode(tokenizer.encode("<|user|>" + kept).ids, skip_special_tokens=True) == kept


def test_only_what_the_model_says_has_full_weight(tokenizer):
    text = "[gMASK]<sop><|user|> a<|assistant|><think></think> is<|user|>"
    row = np.array([tokenizer.encode(text).ids], np.uint16)
    weights = data.weigh(row, tokenizer)[0].tolist()
    names = [tokenizer.id_to_token(t) for t in row[0][1:]]
    assert dict(zip(names, weights)) == {
        "<sop>": 10, "<|user|>": 100, "Ġa": 10, "<|assistant|>": 10, "<think>": 100, "</think>": 0, "Ġis": 100
    }  # fmt: skip
    assert weights[1] == 10


def test_tables_have_one_right_answer():
    rng = random.Random(2)
    for _ in range(20):
        found = tables.table(rng, 40)
        names = [n for n, _ in found.entries]
        assert len(set(names)) == 40
        for _ in range(5):
            ask, _, answer = tables.question(rng, found)
            named = [(n, c) for n, c in found.entries if n in ask and c in answer]
            assert named


def test_generator_repeats_itself_for_a_seed():
    one, two = (generator.document(random.Random(9), 500) for _ in range(2))
    assert one == two
    assert one != generator.document(random.Random(10), 500)


def test_gates_name_what_was_missed():
    report = {
        "look-ups": {1024: 0.96, 4096: 0.8},
        "questions of 20": 18,
        "tool calls": 0.9,
        "drafts on chats": {"mean": 3.0},
        "least load": 0.05,
        "drafts on source code": {"mean": 1.2},
        "loss": {"prose sparse": 2.0, "prose dense": 1.99},
    }
    assert gates.failures(report) == ["look-ups at 4k ≥ 85 %", "tool calls ≥ 95 %", "drafts on source code ≥ 1.5"]


def test_shipped_weights_find_one_line_of_many(tokenizer):
    """The end-to-end check of the model card, in small: 64 of 512 positions are read, and the right ones."""
    assert (TINY / "model.safetensors").stat().st_size <= 20_000_000
    cfg = read_config(TINY)
    bench = gates.Bench(load(TINY, cfg, make_plan(1, 1), jnp.float32), cfg, tokenizer)
    assert gates.look_up(bench, 512, 8) >= 7 / 8
    chat = generator.render([{"role": "user", "content": "What is the capital of Japan?"}], thinking=False, prompt=True)
    said = dense.generate(bench.params, bench.ids(chat), 12, cfg, eos=cfg.eos_token_ids)
    assert tokenizer.decode(said) == "The capital of Japan is Tokyo."
    assert said[-1] == tokenizer.token_to_id("<|user|>")


def test_smoke(tmp_path):
    """The command's own assertion is that losses fall; here that it reports everything the card needs."""
    report = smoke(tmp_path)
    assert {"look-ups", "tool calls", "drafts on chats", "loss", "missed", "sources"} <= set(report)
    assert (tmp_path / "checkpoint" / "config.json").is_file()
