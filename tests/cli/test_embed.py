"""``edgeh2o embed``: the forms of llama-embedding, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM
from edgeh2o.cli.embed import format_json, format_text
from edgeh2o.cli.main import build_parser, main
from edgeh2o.engine.ranking import find_scores
from tests.rank_cases import CASES, DOCUMENTS, FILE, QUERY
from tests.tiny_models import TinyModelFactory

TEXTS = ["the thing", "all that is", "anew"]
# As llama-embedding prints these rows: by its source, and compared on SmolLM2.
ROWS = np.array([[3.0, -4.0, 0.0, 0.5], [-3.0, 4.0, 1.25, 0.0]], np.float32)
PLAIN = """
embedding 0:  3.000000 -4.000000  0.000000  0.500000 
embedding 1: -3.000000  4.000000  1.250000  0.000000 

cosine similarity matrix:

café a    lon 
  1.00  -0.97 café au la
 -0.97   1.00 lon
"""
JSON_PLUS = """{
  "object": "list",
  "data": [
    {
      "object": "embedding",
      "index": 0,
      "embedding": [3.0000000,-4.0000000,0.0000000,0.5000000]
    },
    {
      "object": "embedding",
      "index": 1,
      "embedding": [-3.0000000,4.0000000,1.2500000,0.0000000]
    }
  ],
  "cosineSimilarity": [
    [  1.00,  -0.97 ],
    [ -0.97,   1.00 ]
  ]
}"""


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(n_layers=2, context_length=128)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["embed", *words, "--quiet"]) == 0
    return capsys.readouterr().out


def test_forms_are_those_of_llama_embedding() -> None:
    assert format_text(ROWS, ["café au lait", "lon"], "mean", is_whole=False) == PLAIN
    assert format_json(ROWS, "json+", "{:.7f}", n_texts=2) == JSON_PLUS
    plain = format_json(ROWS, "json", "{:.7f}", n_texts=2)
    assert json.loads(plain) == {
        name: value for name, value in json.loads(JSON_PLUS).items() if name != "cosineSimilarity"
    }
    assert format_json(ROWS, "array", "{:.0f}", n_texts=2) == "[[3,-4,0,0],[-3,4,1,0]]"
    wide = np.arange(20, dtype=np.float32)[None] * [[1.0], [100.0]]
    one = format_text(wide[:1], ["a"], "last", is_whole=True)
    assert one.split() == ["embedding", "0:", *map(str, range(20))]  # of one text all numbers
    two = format_text(wide, ["a", "b"], "last", is_whole=True).splitlines()
    assert [len(line.split()) for line in two[1:3]] == [18, 18]  # of several the first 16
    rows = format_text(wide, ["a b"], "none", is_whole=True).splitlines()
    assert rows[2] == "embedding 1:      0    100    200  ...   1700   1800   1900 "
    assert len(rows) == 3  # tokens are not compared


def test_texts_lie_between_separators(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with LLM(model) as llm:
        expected = llm.embed(TEXTS, "mean")
    for separator, text in (("\n", "\n".join(TEXTS)), ("<#sep#>", "<#sep#>".join(TEXTS))):
        flags = [] if separator == "\n" else ["--embd-separator", separator]
        out = run(
            capsys,
            *(str(model), "-p", text, "--pooling", "mean", "--embd-output-format", "raw", *flags),
        )
        found = np.array([line.split() for line in out.splitlines()], float)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_file_is_one_text_where_nothing_parts_it(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a\n\nb\n", "utf-8")
    with LLM(model) as llm:
        expected = llm.embed("a\n\nb", "last", normalize=False)
    out = run(
        capsys,
        *(str(model), "-f", str(path), "--pooling", "last", "--embd-normalize", "-1"),
        *("--embd-separator", "", "--embd-output-format", "json"),
    )
    (data,) = json.loads(out)["data"]
    np.testing.assert_allclose(data["embedding"], expected, atol=1e-6)


RANKER = {"architecture": "qwen3", "n_layers": 1, "rank_labels": ("yes", "")}
# The form is llama-embedding's, by its source.
RANKS = """
rerank score 0:    0.{} [yes]
rerank score 0:    0.{} [1]
rerank score 1:    0.{} [yes]
rerank score 1:    0.{} [1]
"""


def test_ranks_have_the_form_of_llama_embedding(
    capsys: pytest.CaptureFixture[str], tiny_model: TinyModelFactory
) -> None:
    model = tiny_model(**RANKER)
    with LLM(model) as llm:
        scores = llm.rerank("the thing", ["all that\tis", "anew"])
    lines = "the thing\tall that\tis\nthe thing\tanew"
    out = run(capsys, str(model), "-p", lines, "--pooling", "rank")
    shares = [share for score in scores for share in (score, 1 - score)]
    assert out == RANKS.format(*(f"{share:.3f}"[2:] for share in shares))
    other = lines.replace("\t", " => ", 1).replace("\tanew", " => anew")
    words = [str(model), "-p", other, "--pooling", "rank", "--cls-separator", " => "]
    for form in ("raw", "array", "json", "json+"):
        out = run(capsys, *words, "--embd-output-format", form)
        if form == "raw":
            found = [list(map(float, line.split())) for line in out.splitlines()]
        else:
            said = json.loads(out)
            found = said if form == "array" else [each["embedding"] for each in said["data"]]
        np.testing.assert_allclose(np.ravel(found), shares, atol=1e-6)


def test_logits_of_pairs_have_it_too(
    capsys: pytest.CaptureFixture[str], tiny_model: TinyModelFactory
) -> None:
    """Of a model with one label, whose name is not shown."""
    golden = json.loads(FILE.read_text())["bert_unigram"]
    lines = "\n".join(f"{QUERY}\t{document}" for document in DOCUMENTS)
    out = run(capsys, str(tiny_model(**CASES["bert_unigram"])), "-p", lines)
    found = [line.split(": ") for line in out.strip().splitlines()]
    assert [name for name, _ in found] == [f"rerank score {i}" for i in range(len(DOCUMENTS))]
    np.testing.assert_allclose([float(score) for _, score in found], np.ravel(golden), atol=6e-3)


def test_a_file_says_that_it_ranks(
    capsys: pytest.CaptureFixture[str], tiny_model: TinyModelFactory
) -> None:
    """A line without a separator is a prompt; vectors are made if they are asked for."""
    model = tiny_model(**RANKER, pooling_type=4, context_length=128)
    out = run(capsys, str(model), "-p", "a\tb\na b", "--embd-output-format", "raw")
    with LLM(model) as llm:
        row = llm.embed(["a b"], "last", normalize=False)
        expected = [llm.rerank("a", ["b"])[0], find_scores(row, llm.model)[0, 0]]
    found = [float(line.split()[0]) for line in out.splitlines()]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    out = run(capsys, str(model), "-p", "a", "--pooling", "last", "--embd-output-format", "raw")
    assert len(out.split()) == 256
    long = "the thing " * 200
    for text, message in ((f"a\tb\na\t{long}", "text 2 of 2: the prompt has"), ("", "is empty")):
        assert main(["embed", str(model), "-p", text]) == 2
        assert message in capsys.readouterr().err


def test_without_pooling_every_token_has_a_row(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    with LLM(model) as llm:
        rows = np.concatenate([llm.embed(text, "none") for text in TEXTS])
    words = [str(model), "-p", "\n".join(TEXTS), "--embd-output-format", "array"]
    np.testing.assert_allclose(json.loads(run(capsys, *words)), rows, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", "a", "--pooling", "max"], "pooling 'max' is unknown"),
        (
            ["-p", "a", "--pooling", "rank"],
            "this model does not rank documents: it is no reranking",
        ),
        (["-p", "a", "--embd-normalize", "-2"], "must be an integer from -1 to 64"),
        (["-p", "a\n\nb"], "text 2 of 3: the prompt is empty"),
        (["-p", f"a\n{'the thing ' * 200}"], "text 2 of 2: the prompt has"),
    ],
)
def test_bad_input_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, words: list[str], message: str
) -> None:
    assert main(["embed", str(model), *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_serve_takes_the_flags_of_llama_server() -> None:
    words = ["serve", "M", "--embeddings", "--pooling", "last", "--embd-normalize", "0"]
    with pytest.warns(UserWarning, match="always has /v1/embeddings"):
        args = build_parser().parse_args(words)
    assert (args.pooling, args.embd_normalize) == ("last", 0)
    with pytest.warns(UserWarning, match="always has /v1/rerank of reranking models"):
        assert build_parser().parse_args(["serve", "M", "--reranking"]).pooling is None
    assert build_parser().parse_args(["serve", "M", "--pooling", "rank"]).pooling == "rank"
    with pytest.warns(UserWarning, match="made by 'edgeh2o embed' and 'edgeh2o serve'"):
        build_parser().parse_args(["run", "M", "-p", "x", "--pooling", "mean"])


def test_serve_refuses_an_unknown_pooling_before_it_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "missing.gguf", "--pooling", "max"]) == 2
    assert "pooling 'max' is unknown" in capsys.readouterr().err


def test_models_that_read_to_both_sides(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are embedded, and every verb that writes or measures writing refuses them at once."""
    model = str(tiny_model(architecture="gemma-embedding", n_layers=2, pooling_type=1))
    with LLM(model) as llm:
        expected = llm.embed(TEXTS)
    told = run(capsys, model, "-p", "\n".join(TEXTS), "--embd-output-format", "array")
    np.testing.assert_allclose(json.loads(told), expected, atol=1e-6)
    text = tmp_path / "text.txt"
    text.write_text("all that is " * 400)
    for words in (
        ("run", model, "-p", "a"),
        ("chat", model),
        ("bench", model, "-p", "16", "-n", "0"),
        ("perplexity", model, "-f", str(text)),
    ):
        assert main([*words]) == 2
        assert "makes vectors of texts and writes none: use 'edgeh2o embed'" in (
            capsys.readouterr().err
        )
