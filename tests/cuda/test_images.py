"""Images of the kernels: what the compiler made of them, as far as that shows without a device."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tools import build_cuda_images
from tools.build_cuda_images import (
    LIST_NAME,
    PACKAGE_BYTES,
    TARGETS,
    CompileError,
    Image,
    Nvrtc,
    find_nvrtc,
    find_program,
    provide_images,
    write_images,
)
from tools.cuda_driver import ARGUMENTS

# Registers that leave room for the blocks that the plan of a kernel wants, of 65,536 a processor.
# Matrix products: three blocks of 128 threads, two of those of 128 rows and of
# small blocks of weights.
MOST_REGISTERS = dict.fromkeys((name for name in ARGUMENTS if name.startswith("gemm_")), 168)
MOST_REGISTERS |= dict.fromkeys(
    (name for name in ARGUMENTS if "gemm_tall" in name or ("gemm_" in name and "small" in name)),
    255,
)
# Loads of four rounds on their way.
MOST_REGISTERS |= dict.fromkeys((name for name in ARGUMENTS if "multiply_q" in name), 128)
MOST_REGISTERS["attend_split"] = 128
# Sums of 16 rows of a warp: three blocks of 64, two of 128 columns.
MOST_REGISTERS |= {"attend_tiles_64": 168, "column_tiles_64": 168}
MOST_REGISTERS |= {"attend_tiles_128": 255, "column_tiles_128": 168}
MOST_REGISTERS |= {"attend_tiles_256": 255, "column_tiles_256": 168}
DEFAULT_REGISTERS = 64
# What must show in the code of a kernel: products of four bytes, 16-byte loads.
INSTRUCTIONS = {
    **{name: ("IDP.4A.S8.S8", "LDG.E.128") for name in ARGUMENTS if name.startswith("multiply_q")},
    # Tensor cores on bytes, matrices from shared memory, asynchronous copies to it.
    **{
        name: (
            "IMMA.16816.S8.S8" if "small" in name else "IMMA.16832.S8.S8",
            *("LDSM.16.M88.4", "LDGSTS.E.BYPASS.128", "LDGSTS.E.64"),
        )
        for name in ARGUMENTS
        if name.startswith("gemm_")
    },
    "attend_split": ("MUFU.EX2", "LDG.E"),
    **{
        name: ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS.128")
        for name in ("attend_tiles_64", "attend_tiles_128", "attend_tiles_256")
    },
    **{
        name: ("HMMA.16816.F32", "LDSM.16.M88.4")
        for name in ("column_tiles_64", "column_tiles_128", "column_tiles_256")
    },
    # A state that stays in registers, tokens in shared memory, four numbers at a time.
    "ssd": ("LDS.128", "STS", "FFMA", "BAR.SYNC"),
    "delta_rule": ("LDS", "STS", "FFMA", "BAR.SYNC"),  # a state that stays in shared memory
}


@pytest.fixture(scope="session")
def libraries() -> dict[int, Nvrtc]:
    found = find_nvrtc()
    if not found:
        pytest.skip("no NVRTC: python -m tools.build_cuda_images --fetch gets it")
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="session")
def images(libraries: dict[int, Nvrtc], folder: Path) -> list[Image]:
    return write_images(folder, libraries)


def cubins(images: list[Image]) -> list[Image]:
    return [image for image in images if image.target.startswith("sm_")]


def test_every_target_is_compiled_and_small(
    images: list[Image], libraries: dict[int, Nvrtc], folder: Path
) -> None:
    expected = [t for t, major in TARGETS.items() if major in libraries]
    assert [image.target for image in images] == expected
    assert sum(path.stat().st_size for path in folder.iterdir()) < PACKAGE_BYTES


def test_every_kernel_is_there_within_its_registers_and_spills_nothing(images: list[Image]) -> None:
    for image in cubins(images):
        resources = image.resources()
        assert set(ARGUMENTS) <= set(resources)
        for name, (registers, n_spilled) in resources.items():
            assert n_spilled == 0, (image.target, name)
            assert registers <= MOST_REGISTERS.get(name, DEFAULT_REGISTERS), (image.target, name)


def test_the_image_of_orin_has_the_abi_of_jetpack_6(images: list[Image]) -> None:
    """OSABI and version of the ELF header: drivers before CUDA 13 take 0x33, 7 alone."""
    orin = [image for image in images if image.target == "sm_87"]
    if not orin:
        pytest.skip("no NVRTC of CUDA 12")
    assert orin[0].code[:4] == b"\x7fELF"
    assert orin[0].code[7:9] == b"\x33\x07"


def test_the_ptx_is_for_every_device_from_8_0_on(images: list[Image]) -> None:
    ptx = [image for image in images if image.target == "compute_80"]
    if not ptx:
        pytest.skip("no NVRTC of CUDA 12")
    assert b".target sm_80" in ptx[0].code
    for name in ARGUMENTS:
        assert f".entry {name}(".encode() in ptx[0].code
    version = re.search(rb"^\.version (\d+)\.(\d+)", ptx[0].code, re.M)
    assert version is not None
    assert (int(version[1]), int(version[2])) <= (8, 5)  # CUDA 12.6, that of JetPack 6.2


def test_the_machine_code_has_the_instructions_of_the_plan(
    images: list[Image], tmp_path: Path
) -> None:
    disassembler = find_program("nvdisasm")
    if disassembler is None:
        pytest.skip("no nvdisasm: python -m tools.build_cuda_images --fetch gets it")
    for image in cubins(images):
        path = tmp_path / image.file_name
        path.write_bytes(image.code)
        code = subprocess.run(
            [disassembler, "-c", path], capture_output=True, text=True, check=True
        ).stdout
        parts = dict(re.findall(r"\.text\.(\w+):\n(.*?)(?=\n\s*\.section|\Z)", code, re.S))
        for name, instructions in INSTRUCTIONS.items():
            for instruction in instructions:
                assert instruction in parts[name], (image.target, name, instruction)
        # Sums of products are scaled without a conversion each.
        for name in (name for name in parts if name.startswith("gemm_")):
            assert "I2F" not in parts[name], (image.target, name)
        local = [name for name in ARGUMENTS if re.search(r"\b(STL|LDL)\b", parts[name])]
        assert local == [], "kernels that use local memory"


def test_images_are_those_of_the_sources(tmp_path: Path, images: list[Image], folder: Path) -> None:
    assert images
    assert build_cuda_images.are_current(folder)
    report = json.loads((folder / LIST_NAME).read_text())
    (tmp_path / LIST_NAME).write_text(json.dumps(report | {"sources": "others"}))
    assert not build_cuda_images.are_current(tmp_path)


def test_a_build_without_nvrtc_or_without_cuda_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build_cuda_images, "IMAGES", tmp_path / "none")
    monkeypatch.setattr(build_cuda_images, "find_nvrtc", dict)
    output = tmp_path / "images"
    assert "no NVRTC was found" in provide_images(output)
    monkeypatch.setenv("EDGEH2O_CUDA", "0")
    assert "EDGEH2O_CUDA=0" in provide_images(output)
    assert not output.exists()


def test_a_kernel_that_does_not_compile_is_an_error(
    libraries: dict[int, Nvrtc], tmp_path: Path
) -> None:
    source = tmp_path / "bad.cu"
    source.write_text('extern "C" __global__ void bad() { nothing(); }\n')
    with pytest.raises(CompileError, match="nothing"):
        next(iter(libraries.values())).compile("sm_87", source)
