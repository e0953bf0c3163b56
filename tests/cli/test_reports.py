"""``inspect``, ``doctor`` and ``completion``."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from edgeh2o import LLM, HeadwiseConfig, isa
from edgeh2o.attention.budget_table import table_path, write_table
from edgeh2o.cli.main import build_parser, main
from edgeh2o.cli.report import print_report
from edgeh2o.export.onnx import export_model
from edgeh2o.host.machine import examine_machine
from edgeh2o.host.threads import choose_threads
from tests.budget_tables import harmless_table, table_of_model
from tests.tiny_models import TinyModelFactory
from tests.transformers.folders import write_folder


def test_inspect(tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_model(tensor_type="Q4_0"))
    assert main(["inspect", model, "--json", "-c", "1000"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metadata"]["general.architecture"] == "llama"
    assert report["metadata"]["tokenizer.ggml.tokens"] == "320 strings"
    types = report["tensors"]
    assert types["all"]["tensors"] == types["Q4_0"]["tensors"] + types["F32"]["tensors"]
    assert report["tokenizer"]["ends_generation"] == ["<|endoftext|>", "<|im_end|>"]
    assert report["chat_template"].endswith("<|im_start|>assistant\n")
    needs = report["memory_bytes"]
    assert needs["context"] == 1000
    assert needs["kv_cache"] == 2 * 2 * 3 * 2 * 32 * 1000
    assert needs["total"] > needs["weights"] + needs["kv_cache"]
    assert needs["largest_context_that_fits"] == 2048
    assert main(["inspect", model]) == 0
    text = capsys.readouterr().out
    assert "  general.architecture " in text
    assert "largest_context_that_fits  2,048" in text
    assert main(["inspect", model, "--json", "-c", "3000"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"]["largest_context_that_fits"] == 3000


def test_inspect_shows_the_budget_of_the_context(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model(tensor_type="Q4_0", context_length=16384)
    with LLM(path) as llm:
        table = harmless_table(llm.config, 512)
    write_table(table, tmp_path / "tiny.json")
    budgets, scores = [], []
    for context in ((), ("-c", "8192"), ("-c", "100")):
        command = ["inspect", str(path), "--json", "--budget-table", str(tmp_path / "tiny.json")]
        assert main([*command, *context]) == 0
        report = json.loads(capsys.readouterr().out)
        budgets.append(report["attention"]["budget"])
        scores.append(report["memory_bytes"])
        lengths = report["attention"].get("prompts", "")
        assert lengths.startswith("sparse in contexts of") == (context != ("-c", "100"))
        assert report["attention"]["generated_tokens"] == "read everything"
    assert budgets == [1152, 768, 512]
    # What a session of that length allocates.
    with LLM(path, attention=HeadwiseConfig(budget_table=str(tmp_path / "tiny.json"))) as llm:
        for report, n in zip(scores, (16384, 8192), strict=False):
            held = llm.start_runner(n).memory_bytes
            assert {name: report[name] for name in held} == held


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3moe"])
def test_inspect_counts_every_weight_once(
    tiny_model: TinyModelFactory, architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor of the file may hold several weights."""
    assert main(["inspect", str(tiny_model(architecture=architecture)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["memory_bytes"]["weights"] == report["tensors"]["all"]["bytes"]


def test_inspect_lists_tensors(
    tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model(tensor_type="Q4_0"))
    assert main(["inspect", model, "--json", "--tensors"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["tensor_list"]) == report["tensors"]["all"]["tensors"]
    assert report["tensor_list"]["blk.0.attn_norm.weight"].startswith("F32 ")
    assert report["tensor_list"]["token_embd.weight"].endswith(" x 320")


def test_inspect_refuses_flags_that_it_cannot_heed(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tensor_type="Q4_0")
    assert main(["inspect", str(model), "--isa", "none"]) == 2
    assert "ISA 'none' is not available" in capsys.readouterr().err
    export_model(model, tmp_path / "onnx")
    for flag in ("--check-tensors", "--tensors"):
        assert main(["inspect", str(tmp_path / "onnx"), flag]) == 2
        captured = capsys.readouterr()
        assert "inspect looks into the tensors of GGUF files only" in captured.err
        assert captured.out == ""


def test_inspect_takes_the_budgets_of_the_model(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its numbers are those of a run, whose budgets are looked up by the weights."""
    model = str(tiny_model(tensor_type="Q4_0"))
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))
    with LLM(model) as llm:
        config = llm.config
    sizes = {"chunk_size": 256, "length": 1024, "mean_past": 512.0, "levels": (64, 128)}
    write_table(table_of_model(config, ((1.0, 0.5),), **sizes), table_path(config.fingerprint))
    flags = [model, "-c", "1000", "--budget", "128", "--json"]
    assert main(["run", *flags, "-p", "the", "-n", "1"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert main(["inspect", *flags]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert inspected["attention"]["table"] == "cache"
    expected = run["attention"] | {"chunk_size": run["chunk_size"]}
    assert inspected["attention"] == expected | {"generated_tokens": "read everything"}
    for purpose in ("kv_cache", "activations", "scratch", "scores"):
        assert inspected["memory_bytes"][purpose] == run["memory_bytes"][purpose]


def test_inspect_counts_a_layer_that_guesses_ahead(
    tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside what a run takes without it; its numbers are those of a run with it."""
    model = str(tiny_model(architecture="qwen35", n_layers=2, n_drafting_layers=1))
    assert main(["run", model, "-c", "1000", "-p", "a", "-n", "1", "--draft", "mtp", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert main(["inspect", model, "-c", "1000", "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)["memory_bytes"]
    sizes = needs["with --draft mtp"]
    assert sizes["draft_session"] == run["draft_session"] > 0
    assert 0 < sizes["draft_weights"] <= run["draft_weights"]
    other = str(tiny_model(architecture="qwen35", n_layers=2))
    assert main(["inspect", other, "--json"]) == 0
    assert "with --draft mtp" not in json.loads(capsys.readouterr().out)["memory_bytes"]


def test_inspect_of_what_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "strange\x1b[2J")
    writer.add_string("tokenizer.chat_template", "{% for")
    writer.add_string("key\x1b[2J", "value")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "strange" in text
    assert "\x1b" not in text
    assert "not usable: the file has no tokenizer" in text
    assert main(["inspect", str(tmp_path / "none")]) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"version": "1.0"', "tokenizer.json is not JSON"),
        ("{}", "tokenizer.json describes no tokenizer"),
        ('{"model": {"type": "None"}}', "tokenizer.json"),
        (None, "there is no tokenizer.json"),
    ],
)
def test_inspect_says_of_a_folder_what_run_refuses(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    problem: str,
) -> None:
    folder = write_folder(tiny_model(), tmp_path / "folder")
    (folder / "tokenizer.json").unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    assert main(["inspect", str(folder)]) == 0
    rows = capsys.readouterr().out.splitlines()
    (row,) = [row for row in rows if row.startswith("tokenizer")]
    assert main(["run", str(folder), "-p", "x"]) == 1
    refusal = capsys.readouterr().err.strip().removeprefix("edgeh2o: error: ")
    assert row == f"tokenizer      not usable: {refusal}"
    assert problem in refusal


def test_inspect_warns_once(
    tiny_model: TinyModelFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.gguf"
    content = tiny_model(tensor_type="Q4_0").read_bytes()
    path.write_bytes(content.replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.not"))
    assert main(["inspect", str(path)]) == 0
    assert [r.levelname for r in caplog.records if "pre-tokenizer" in r.message] == ["WARNING"]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"]["chosen"] == isa.active()
    assert report["threads"]["chosen"] == choose_threads().count
    assert report["memory_bytes"]["total"] > report["memory_bytes"]["available"] > 0
    assert report["versions"]["numpy"]
    assert main(["doctor"]) == 0
    assert "usable_by_affinity" in capsys.readouterr().out


def test_a_report_says_where_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({"heat": {"degrees": {}, "governor": None}, "names": []}, as_json=False)
    assert capsys.readouterr().out == ("heat:\n  degrees   none\n  governor  -\nnames  none\n")


def test_what_a_board_tells(tmp_path: Path) -> None:
    for name, text in {
        "proc/cpuinfo": "processor : 0\nFeatures : fp asimd asimddp\nModel : Board\n",
        "sys/firmware/devicetree/base/model": "Raspberry Pi 5\0",
        "sys/class/thermal/thermal_zone0/temp": "61500\n",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone1/temp": "none\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "var/lib/nvpmodel/status": "pmode:0002\n",
        "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "2\n",
        "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "3\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    report = examine_machine(tmp_path)
    assert report["cpu"]["model"] == "Board (Raspberry Pi 5)"
    assert report["cpu"]["features"] == ["asimd", "asimddp"]
    assert report["heat"] == {
        "degrees_celsius": {"cpu-thermal": 61.5},
        "throttled_times": 5,
        "power_mode": "pmode:0002",
        "governor": "powersave",
    }
    bare = examine_machine(tmp_path / "nothing")
    assert bare["cpu"]["features"] == []
    assert bare["heat"]["degrees_celsius"] == {}


def _verbs() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser()
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_flag(
    capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for verb, parser in _verbs().items():
        assert verb in script
        for action in parser._actions:
            for flag in action.option_strings:
                assert flag in script or f"-l {flag[2:]} " in script or f"{flag[1:]} " in script
    program = shutil.which(shell)
    if program is not None:
        check = subprocess.run([program, "-n"], input=script, text=True, check=False)
        assert check.returncode == 0


def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "model.gguf").touch()

    def complete(*words: str) -> set[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _edgeh2o\n"
        ask += 'echo "${COMPREPLY[@]}"'
        result = subprocess.run(
            ["bash", "-c", script + ask], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return set(result.stdout.split())

    assert complete("edgeh2o", "ru") == {"run"}
    assert complete("edgeh2o", "he") == {"help", "heatmap"}
    assert complete("edgeh2o", "help", "ru") == {"run"}
    assert complete("edgeh2o", "run", "mo") == {"model.gguf"}
    assert complete("edgeh2o", "run", "--h2o-l") == {"--h2o-local"}
    assert complete("edgeh2o", "completion", "") == {"bash", "zsh", "fish"}
    assert complete("edgeh2o", "run", "-m", "") == {"model.gguf"}
    assert complete("edgeh2o", "run", "m", "--cache-type", "") == {"f16", "f32", "q8_0"}
    assert complete("edgeh2o", "bench", "m", "-o", "j") == {"json", "jsonl"}
