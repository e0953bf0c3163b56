"""Low-rank adapters: a model with one is the model that it was merged into."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgeh2o import LLM, SamplingParams, _core
from edgeh2o.cli.main import main
from edgeh2o.errors import EdgeH2OError, FormatError, UsageError
from edgeh2o.lora_config import LoraAdapter, make_adapters, read_adapters
from edgeh2o.runners.native import NativeModelFile
from tests.model.golden_cases import options_of
from tests.models.lora_files import (
    ALPHA,
    RANK,
    Pairs,
    matrices_of,
    merge,
    random_pairs,
    write_adapter,
)
from tests.tiny_models import TinyModelFactory

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TOKENS = np.random.default_rng(3).integers(3, 90, 150).astype(np.int32)
# Every kind of matrix: fused and split ones, those of experts, recurrent and latent layers.
CASES = [
    *("llama", "qwen2moe", "phi3", "gptneox", "qwen35", "lfm2", "granitehybrid", "minicpm3"),
    *("gemma3n", "gpt-oss", "deepseek2_dense", "jamba", "bitnet_scales"),
]


def logits_of(model: Path, lora: tuple[LoraAdapter, ...] = (), **sizes: int) -> np.ndarray:
    """float32 [n, vocab] of a prompt's end and of tokens behind it."""
    with NativeModelFile(model, lora=lora) as file:
        core = file.load()._core_model
    sizes = {"max_context": 256, "batch_size": 128, "chunk_size": 32, "threads": 1} | sizes
    session = _core.Sequence(core, _core.h2o_policy(12, 4), **sizes, cache_type="f32")
    rows = []
    for begin in range(0, 140, sizes["batch_size"]):
        part = TOKENS[begin : min(begin + sizes["batch_size"], 140)]
        rows = [session.prefill(part, is_last=begin + len(part) == 140)]
    return np.stack([*rows, *(session.decode(int(token)) for token in TOKENS[140:144])])


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_that_it_was_merged_into(
    tiny_model: TinyModelFactory, tmp_path: Path, case: str
) -> None:
    options = options_of(case)
    architecture = str(options.get("architecture", "llama"))
    model = tiny_model(**options)
    pairs = random_pairs(model, matrices_of(model))
    adapter = write_adapter(tmp_path / "a.gguf", pairs, architecture=architecture)
    merged = merge(model, tmp_path / "merged.gguf", pairs, ALPHA / RANK)
    expected = logits_of(merged)
    assert np.abs(expected - logits_of(model)).max() > 0.05
    got = logits_of(model, (LoraAdapter(str(adapter)),))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-3)


@pytest.fixture
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(**options_of("llama"))


def test_several_count_together_by_their_scales(model: Path, tmp_path: Path) -> None:
    """One matrix has a part in both, with another rank; one of them names no alpha."""
    first = random_pairs(model, {"blk.0.attn_q.weight": 3, "blk.1.ffn_down.weight": 40})
    second = random_pairs(model, {"blk.0.attn_q.weight": 8, "blk.2.attn_v.weight": 1}, seed=1)
    files = [
        write_adapter(tmp_path / "1.gguf", first, alpha=4.0, dtype=np.float16),
        write_adapter(tmp_path / "2.gguf", second, alpha=None),
    ]
    merged = model
    for n, (pairs, alpha, scale) in enumerate([(first, 4.0, 0.5), (second, None, -2.0)]):
        for name, (a, b) in pairs.items():
            rounded = (a, b) if alpha is None else (a.astype(np.float16), b.astype(np.float16))
            factor = scale if alpha is None else scale * alpha / b.shape[-1]
            merged = merge(merged, tmp_path / f"{n}-{name}.gguf", {name: rounded}, factor)
    lora = (LoraAdapter(str(files[0]), 0.5), LoraAdapter(str(files[1]), -2.0))
    np.testing.assert_allclose(logits_of(model, lora), logits_of(merged), rtol=0, atol=1e-3)


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q6_K", "F16"])
def test_calls_and_threads_change_nothing(
    tiny_model: TinyModelFactory, tmp_path: Path, tensor_type: str
) -> None:
    """Beside quantised weights too, whose products read other rows than those of an adapter."""
    sizes = {"model_dim": 256, "head_dim": 64, "ffn_dim": 512}
    model = tiny_model(**options_of("llama") | {**sizes, "tensor_type": tensor_type})
    adapter = write_adapter(tmp_path / "a.gguf", random_pairs(model, matrices_of(model)))
    lora = (LoraAdapter(str(adapter)),)
    expected = logits_of(model, lora)
    assert np.abs(expected - logits_of(model)).max() > 0.05
    np.testing.assert_array_equal(logits_of(model, lora, threads=3), expected)
    with NativeModelFile(model, lora=lora) as file:
        core = file.load()._core_model
    session = _core.Sequence(
        core,
        _core.h2o_policy(12, 4),
        max_context=256,
        batch_size=128,
        chunk_size=32,
        cache_type="f32",
    )
    session.prefill(TOKENS[:128], is_last=False)
    session.prefill(TOKENS[128:140], is_last=True)
    np.testing.assert_array_equal(session.decode_batch(TOKENS[140:144]), expected[1:])


def test_a_scale_of_zero_is_the_model_itself(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", random_pairs(model, matrices_of(model)))
    np.testing.assert_array_equal(
        logits_of(model, (LoraAdapter(str(adapter), 0),)), logits_of(model)
    )


def test_an_answer_and_a_session_file(model: Path, tmp_path: Path) -> None:
    """What was read with an adapter is not taken up without it."""
    pairs = random_pairs(model, matrices_of(model))
    adapter = write_adapter(tmp_path / "a.gguf", pairs)
    merged = merge(model, tmp_path / "merged.gguf", pairs, ALPHA / RANK)
    prints, texts = set(), []
    for path, lora in [(model, adapter), (merged, None), (model, (adapter, 0.5)), (model, None)]:
        with LLM(path, lora=lora) as llm:
            texts.append(llm.generate("the cat sat on the mat", GREEDY).token_ids)
            prints.add(llm.model.fingerprint)
            weight_bytes = llm.model.weight_bytes
    assert texts[0] == texts[1] != texts[3] and len(prints) == 4
    with LLM(model, lora=[adapter, adapter]) as llm:
        assert llm.model.weight_bytes > weight_bytes
        llm.generate("the cat sat", GREEDY, keep_cache=True)
        llm.save_session(tmp_path / "session")
    with LLM(model) as llm, pytest.raises(EdgeH2OError, match="made with lora"):
        llm.load_session(tmp_path / "session")


def test_prompts_say_what_adapters_count(model: Path, tmp_path: Path) -> None:
    """And so do session files: a prompt goes on from one that was read by the same scales."""
    names, prompt = matrices_of(model), "the cat sat on the mat"
    files = [
        write_adapter(tmp_path / f"{seed}.gguf", random_pairs(model, names, seed=seed))
        for seed in (0, 1)
    ]
    expected = []
    for lora in ([files[0]], [files[1]], [], [(files[0], 0.5), files[1]]):
        with LLM(model, lora=lora) as llm:
            expected.append(llm.generate(prompt, GREEDY, logprobs=True).logprobs)
    with LLM(model, lora=[(files[0], 0.5), files[1]]) as llm:
        for lora, logprobs in zip(({0: 1.0}, {1: 1}, {}, None), expected, strict=True):
            result = llm.generate(prompt, GREEDY, logprobs=True, lora=lora)
            assert result.logprobs == logprobs
        for lora, n_cached in (({0: 1}, False), ({0: 1}, True), ({1: 1}, False), (None, False)):
            result = llm.stream(prompt, GREEDY, keep_cache=True, lora=lora)
            assert bool(list(result) and result.result().stats.cached_tokens) == n_cached
        llm.generate(prompt, GREEDY, keep_cache=True, lora={0: 1})
        llm.save_session(tmp_path / "session")
        llm.generate(prompt, GREEDY, keep_cache=True)
        llm.load_session(tmp_path / "session")
        result = llm.generate(prompt, GREEDY, keep_cache=True, logprobs=True, lora={0: 1})
        assert result.stats.cached_tokens > 0 and result.logprobs == expected[0]
    for alike in ([files[0]], [files[0], (files[1], 0)]):  # one of scale 0 counts nothing
        with LLM(model, lora=alike) as llm:
            llm.load_session(tmp_path / "session")
            result = llm.generate(prompt, GREEDY, keep_cache=True, logprobs=True)
            assert result.stats.cached_tokens > 0 and result.logprobs == expected[0]
    for others in ([], [(files[0], 0.5), (files[1], 0.5), files[1]]):
        with LLM(model, lora=others) as llm, pytest.raises(UsageError, match="made with lora"):
            llm.load_session(tmp_path / "session")


def test_a_command_takes_up_sessions_of_its_own_scales(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", random_pairs(model, matrices_of(model)))
    with LLM(model, lora=adapter) as llm:
        llm.generate("the cat", GREEDY, keep_cache=True, lora={0: 0.5})
        llm.save_session(tmp_path / "session")
    command = [
        "run",
        str(model),
        "-p",
        "the cat",
        "-n",
        "1",
        "--session",
        str(tmp_path / "session"),
    ]
    assert main([*command, "--lora", str(adapter)]) == 2
    assert "made with lora [0.5]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({2: 1.0}, r"no adapter 2; there are 1 loaded, from 0 on"),
        ({-1: 1.0}, "no adapter -1"),
        ({"0": 1.0}, "no adapter '0'"),
        ({0: "1"}, "scale must be from -1000 to 1000, got '1'"),
        ({0: float("nan")}, "scale"),
        ([1.0], "maps adapters to scales"),
    ],
)
def test_scales_that_cannot_be(
    model: Path, tmp_path: Path, lora: dict[int, float], message: str
) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", random_pairs(model, ["blk.0.attn_q.weight"]))
    with LLM(model, lora=adapter) as llm, pytest.raises(UsageError, match=message):
        llm.generate("the cat", GREEDY, lora=lora)


def test_matrices_that_nothing_reads_may_have_one(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """Layers of Gemma 3n that share keys and values have matrices for them all the same."""
    model = tiny_model(**options_of("gemma3n"))
    pairs = random_pairs(model, [matrices_of(model)[-1], "blk.20.attn_k.weight"])
    adapter = write_adapter(tmp_path / "a.gguf", pairs, architecture="gemma3n")
    assert np.isfinite(logits_of(model, (LoraAdapter(str(adapter)),))).all()


def _swapped(pairs: Pairs) -> Pairs:
    return {name: (b, a) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        ([], {}, "it has no tensors"),
        (["blk.0.attn_q.weight"], {"general_type": "model"}, "it is no adapter"),
        (["blk.0.attn_q.weight"], {"kind": "ia3"}, "the kind 'ia3'"),
        (["blk.0.attn_q.weight"], {"architecture": "qwen2"}, "of architecture 'qwen2'"),
        (["token_embd.weight"], {}, "'token_embd.weight' is no matrix .* merge it"),
        (["blk.0.ffn_up.weight"], {"swap": True}, "'blk.0.ffn_up.weight.lora_a' and its other"),
        (["blk.0.ffn_up.weight"], {"rename": "blk.7.ffn_up.weight"}, "no tensor 'blk.7.ffn_up"),
        (["blk.0.ffn_up.weight"], {"spoil": True}, "NaN or infinite"),
    ],
)
def test_adapters_that_do_not_fit(
    model: Path, tmp_path: Path, names: list[str], changes: dict[str, object], message: str
) -> None:
    pairs, changes = random_pairs(model, names), dict(changes)
    if changes.pop("swap", False):
        pairs = _swapped(pairs)
    if changes.pop("spoil", False):
        pairs[names[0]][1][2, 1] = np.nan
    if new := changes.pop("rename", None):
        pairs = {str(new): pairs[names[0]]}
    adapter = write_adapter(tmp_path / "a.gguf", pairs, **changes)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=message) as raised:
        logits_of(model, (LoraAdapter(str(adapter)),))
    assert str(adapter) in str(raised.value)


def test_a_half_that_is_missing_is_named(model: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match=r"'blk.0.attn_q.weight.lora_b' is missing"):
        LLM(model, lora=tmp_path / "a.gguf")


def test_an_adapter_is_no_model(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", random_pairs(model, matrices_of(model)))
    with pytest.raises(
        FormatError, match=r"is a LoRA adapter; name its model, and this with --lora"
    ):
        LLM(adapter)


def test_ways_to_name_adapters(tmp_path: Path) -> None:
    one, two = LoraAdapter("a.gguf"), LoraAdapter("b.gguf", 0.5)
    assert make_adapters(None) == ()
    assert make_adapters(Path("a.gguf")) == make_adapters("a.gguf") == (one,)
    assert make_adapters(("b.gguf", 0.5)) == make_adapters([two]) == (two,)
    assert make_adapters(["a.gguf", ("b.gguf", 0.5)]) == make_adapters((one, two)) == (one, two)
    assert make_adapters(("a.gguf", "b.gguf"))[1].path == "b.gguf"
    assert read_adapters("a.gguf,b.gguf:0.5") == (one, two)
    assert read_adapters("C:a.gguf") == (LoraAdapter("C:a.gguf"),)
    odd = tmp_path / "a,b:2"
    odd.touch()
    assert read_adapters(str(odd)) == (LoraAdapter(str(odd)),)
    assert read_adapters(f"{odd}") == (LoraAdapter(str(odd)),)


@pytest.mark.parametrize(
    "lora", [3, [3], [("a", "b", "c")], ("a", float("nan")), ("a", 1e9), "", [""]]
)
def test_what_names_no_adapter(lora: object) -> None:
    with pytest.raises(UsageError, match=r"lora|scale"):
        make_adapters(lora)  # type: ignore[arg-type]
