"""Rows 1-14 and 23: malformed and hostile GGUF headers, and files cut or damaged at any byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from tests.bad_input.refusal import Refusal
from tests.formats import raw_gguf as raw
from tests.formats.raw_gguf import gguf, key, tensor, text, u32, u64

ALIGNMENT = "general.alignment"
NAME = raw.key("general.name", raw.STRING, raw.text("x"))
DATA = bytes(4096)


def string_key(length: int) -> bytes:
    return key("k", raw.STRING, text(b"", length=length))


def array_key(kind: int, count: int, payload: bytes = b"") -> bytes:
    return key("k", raw.ARRAY, u32(kind) + u64(count) + payload)


def nested_arrays(depth: int) -> bytes:
    return key("k", raw.ARRAY, (u32(raw.ARRAY) + u64(1)) * depth + u32(raw.UINT8) + u64(0))


HOSTILE = {
    # version
    (2, "version 0"): (gguf(version=0), "version 0 is not supported"),
    (2, "version 1"): (gguf(version=1), "version 1 is not supported"),
    (2, "version 4"): (gguf(version=4), "version 4 is not supported"),
    (23, "big-endian"): (gguf(version=3 << 24), "big-endian"),
    # counts
    (3, "tensors 2^64-1"): (gguf(n_tensors=2**64 - 1), "number of tensors is 18446744073709551615"),
    (3, "tensors 2^63"): (gguf(n_tensors=2**63), "number of tensors"),
    (3, "tensors 2^32"): (gguf(n_tensors=2**32), "number of tensors"),
    (3, "tensors 1000"): (
        gguf(n_tensors=1000),
        "number of tensors is 1000, which takes 33000 bytes",
    ),
    (3, "keys 2^64-1"): (gguf(n_keys=2**64 - 1), "number of metadata keys"),
    (3, "keys 2^63"): (gguf(n_keys=2**63), "number of metadata keys"),
    (3, "keys 1000"): (gguf(n_keys=1000), "number of metadata keys is 1000"),
    (1, "key missing"): (gguf([NAME], n_keys=2, data=DATA), "key 2 of 2.*empty"),
    # keys
    (4, "key length 2^63"): (gguf([text(b"k", length=2**63) + DATA]), "the key has 92233720"),
    (4, "key empty"): (gguf([key("", raw.UINT8, b"\1")]), "key 1 of 1.*the key is empty"),
    (4, "key not UTF-8"): (gguf([key(b"\xff\xfe", raw.UINT8, b"\1")]), "not UTF-8"),
    (4, "key with NUL"): (gguf([key("a\0b", raw.UINT8, b"\1")]), "NUL"),
    (4, "key of 65 KiB"): (
        gguf([key("k" * 2**16, raw.UINT8, b"\1")]),
        "65536 bytes, at most 65535",
    ),
    (5, "key twice"): (gguf([NAME, NAME]), "'general.name'.*appears twice"),
    # values
    (6, "value type 13"): (gguf([key("k", 13, DATA)]), "key 'k'.*unknown value type 13"),
    (6, "value type 2^32-1"): (gguf([key("k", 2**32 - 1, DATA)]), "unknown value type 4294967295"),
    (6, "boolean 2"): (
        gguf([key("k", raw.BOOL, b"\2")]),
        "boolean must be stored as 0 or 1, not 2",
    ),
    (6, "booleans 2"): (gguf([array_key(raw.BOOL, 2, b"\1\2")]), "boolean must be"),
    (6, "string not UTF-8"): (gguf([key("k", raw.STRING, text(b"\xc3\x28"))]), "not UTF-8"),
    (7, "string 2^40"): (gguf([string_key(2**40)]), "'k'.*the string has 1099511627776 bytes"),
    (7, "string 2^64-1"): (gguf([string_key(2**64 - 1)]), "the string has 18446744073709551615"),
    (1, "string 4096"): (gguf([string_key(4096)]), "takes 4096 bytes, but the file has"),
    (6, "array of unknown"): (gguf([array_key(99, 0)]), "unknown value type 99"),
    (6, "array of arrays"): (gguf([nested_arrays(1)]), "arrays of arrays"),
    (6, "nested 5000 deep"): (gguf([nested_arrays(5000)]), "arrays of arrays"),
    (7, "bytes 2^40"): (gguf([array_key(raw.UINT8, 2**40)]), "items is 1099511627776"),
    (7, "doubles 2^61"): (gguf([array_key(raw.FLOAT64, 2**61)]), "items is 2305843009213693952"),
    (7, "doubles 600"): (
        gguf([array_key(raw.FLOAT64, 600, DATA)]),
        "items is 600, which takes 4800",
    ),
    (7, "strings 2^40"): (gguf([array_key(raw.STRING, 2**40)]), "items is 1099511627776"),
    (7, "strings 2^64-1"): (
        gguf([array_key(raw.STRING, 2**64 - 1)]),
        "items is 18446744073709551615",
    ),
    (7, "strings 600"): (
        gguf([array_key(raw.STRING, 600, DATA)]),
        "items is 600, which takes 4800",
    ),
    (7, "item length 2^63"): (
        gguf([array_key(raw.STRING, 2, text("a") + u64(2**63) + DATA)]),
        "item 1 of 2 strings reaches beyond the end",
    ),
    (7, "item length at end"): (
        gguf([array_key(raw.STRING, 2, text("a" * 20))], alignment=1),
        "item 1 of 2 strings reaches beyond the end",
    ),
    (6, "item not UTF-8"): (
        gguf([array_key(raw.STRING, 2, text("a") + text(b"\x80"))]),
        "'k'.*item 1 is not UTF-8",
    ),
    # alignment
    (8, "alignment 0"): (gguf([key(ALIGNMENT, raw.UINT32, u32(0))]), "alignment is 0"),
    (8, "alignment 3"): (gguf([key(ALIGNMENT, raw.UINT32, u32(3))]), "alignment is 3"),
    (8, "alignment 2^31"): (
        gguf([key(ALIGNMENT, raw.UINT32, u32(2**31))]),
        "alignment is 2147483648",
    ),
    (8, "alignment as i64"): (gguf([key(ALIGNMENT, raw.INT64, u64(32))]), "type UINT32, not INT64"),
    (8, "alignment unlike the layout"): (
        gguf(
            [key(ALIGNMENT, raw.UINT32, u32(64))],
            [tensor("a", [8]), tensor("b", [8], offset=32)],
            DATA,
        ),
        "'b': data offset 32 is not a multiple of the alignment 64",
    ),
    # dimensions
    (9, "dims 0"): (gguf(tensors=[tensor("a", [])], data=DATA), "'a'.*has 0 dimensions"),
    (9, "dims 5"): (gguf(tensors=[tensor("a", [1] * 5)], data=DATA), "has 5 dimensions"),
    (9, "dims 9"): (gguf(tensors=[tensor("a", [1] * 9)], data=DATA), "has 9 dimensions"),
    (9, "dims 2^32-1"): (gguf(tensors=[text("a") + u32(2**32 - 1) + DATA]), "has 4294967295 dim"),
    (10, "dim 0"): (gguf(tensors=[tensor("a", [4, 0])], data=DATA), "dimension 1 is 0"),
    (10, "dim negative"): (gguf(tensors=[tensor("a", [2**64 - 1])]), "more values than any file"),
    (10, "dims 2^62 x 4"): (gguf(tensors=[tensor("a", [2**62] * 4)]), "more values than any file"),
    (10, "product wraps to 0"): (
        gguf(tensors=[tensor("a", [2**32, 2**32])]),
        "more values than any",
    ),
    (10, "product wraps small"): (
        gguf(tensors=[tensor("a", [2**63 + 8, 2])], data=DATA),
        "more values than any",
    ),
    (10, "bytes near 2^64"): (
        gguf(tensors=[tensor("a", [2**62 - 1])], data=DATA),
        "'a'.*beyond the end of the file: 184467440737095",
    ),
    (10, "sum beyond 2^64"): (
        gguf(
            tensors=[
                tensor("a", [2**61]),
                tensor("b", [2**61], offset=2**63),
                tensor("c", [8], offset=0),
            ],
            data=DATA,
        ),
        "'c': data offset 0 overlaps",
    ),
    # types
    (11, "type 250"): (gguf(tensors=[tensor("a", [32], 250)], data=DATA), "'a'.*unknown.*id 250"),
    (11, "type -1"): (
        gguf(tensors=[tensor("a", [32], 2**32 - 1)], data=DATA),
        "unknown tensor type",
    ),
    (11, "type 4"): (gguf(tensors=[tensor("a", [32], 4)], data=DATA), r"Q4_2 \(id 4\) was removed"),
    (11, "type 5"): (gguf(tensors=[tensor("a", [32], 5)], data=DATA), "Q4_3"),
    (11, "type 137"): (
        gguf(tensors=[tensor("a", [32], 137)], data=DATA),
        r"'a'.*type IQ2_K \(id 137\) is ik_llama.cpp's.*fetch the model in a type of llama.cpp",
    ),
    (11, "type 31"): (gguf(tensors=[tensor("a", [32], 31)], data=DATA), "Q4_0_4_4"),
    (11, "type 36"): (
        gguf(tensors=[tensor("a", [32], 36)], data=DATA),
        r"IQ4_NL_4_4 \(id 36\) was removed.*bitnet\.cpp it is I2_S, which runs there alone",
    ),
    (11, "type 38"): (gguf(tensors=[tensor("a", [32], 38)], data=DATA), "IQ4_NL_8_8"),
    (12, "row not of whole blocks"): (
        gguf(tensors=[tensor("a", [33, 32], raw.Q4_0)], data=DATA),
        "'a'.*rows of 33 values do not divide into Q4_0 blocks of 32",
    ),
    # offsets
    (13, "offset past the end"): (
        gguf(tensors=[tensor("a", [8], offset=2**40)], data=DATA),
        "a gap",
    ),
    (13, "offset near 2^64"): (
        gguf(tensors=[tensor("a", [8], offset=2**64 - 32)], data=DATA),
        "a gap",
    ),
    (13, "offset misaligned"): (
        gguf(tensors=[tensor("a", [8]), tensor("b", [8], offset=33)], data=DATA),
        "'b': data offset 33 is not a multiple",
    ),
    (13, "overlap"): (
        gguf(tensors=[tensor("a", [32]), tensor("b", [8], offset=96)], data=DATA),
        "'b': data offset 96 overlaps the tensor before it, which ends at 128",
    ),
    (13, "gap"): (
        gguf(tensors=[tensor("a", [8]), tensor("b", [8], offset=64)], data=DATA),
        "'b': data offset 64 leaves a gap",
    ),
    (13, "not in order"): (
        gguf(tensors=[tensor("a", [8], offset=32), tensor("b", [8], offset=0)], data=DATA),
        "'a': data offset 32 leaves a gap",
    ),
    (1, "data missing"): (
        gguf(tensors=[tensor("a", [8]), tensor("b", [8, 4], offset=32)], data=bytes(60)),
        "'b'.*100 of 288 bytes are missing; the download is incomplete",
    ),
    # tensor names
    (14, "name of 64 bytes"): (
        gguf(tensors=[tensor("n" * 64, [8])], data=DATA),
        "64 bytes, at most 63",
    ),
    (14, "name empty"): (
        gguf(tensors=[tensor("", [8])], data=DATA),
        "tensor 1 of 1.*name is empty",
    ),
    (14, "name with NUL"): (gguf(tensors=[tensor("a\0", [8])], data=DATA), "NUL"),
    (14, "name not UTF-8"): (gguf(tensors=[tensor(b"\xff", [8])], data=DATA), "not UTF-8"),
    (5, "name twice"): (
        gguf(tensors=[tensor("a", [8]), tensor("a", [8], offset=32)], data=DATA),
        "'a'.*appears twice",
    ),
}


@pytest.mark.parametrize(("row", "case"), HOSTILE)
def test_refuses(tmp_path: Path, refusal: Refusal, row: int, case: str) -> None:
    content, problem = HOSTILE[row, case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    refusal(["run", str(path), "-p", "x"], code=1, problem=rf"{path}: .*({problem})")


def test_the_rows_are_complete() -> None:
    assert {row for row, _ in HOSTILE} == {*range(1, 15), 23}


def small_content() -> bytes:
    """A correct file with every kind of entry."""
    keys = [
        key("general.architecture", raw.STRING, text("test")),
        key("k.int", raw.INT16, raw.scalar(raw.INT16, -3)),
        key("k.float", raw.FLOAT64, raw.scalar(raw.FLOAT64, 0.5)),
        key("k.bools", raw.ARRAY, raw.array(raw.BOOL, [1, 0])),
        key("k.numbers", raw.ARRAY, raw.array(raw.UINT32, [1, 2, 3])),
        key("k.strings", raw.ARRAY, raw.array(raw.STRING, ["a", "bc", ""])),
        key(ALIGNMENT, raw.UINT32, u32(32)),
    ]
    return raw.gguf_of(
        keys,
        {
            "a": raw.f32_tensor(3),
            "b": raw.RawTensor((32, 2), raw.Q4_0, bytes(36)),
            "c": raw.f32_tensor(2, 2, values=[1, 2, 3, 4]),
        },
    )


def test_refuses_a_file_cut_at_any_byte(tmp_path: Path) -> None:
    content = small_content()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    with open_gguf(path) as file:
        last = file.tensors["c"]
        n_needed = last.offset + last.n_bytes
    assert n_needed <= len(content)
    for n_kept in range(n_needed):
        path.write_bytes(content[:n_kept])
        with pytest.raises(FormatError) as caught:
            open_gguf(path)
        assert str(caught.value).startswith(f"{path}: ")
    path.write_bytes(content[:n_needed])
    open_gguf(path).close()


def test_random_damage_gives_a_file_or_a_format_error(tmp_path: Path) -> None:
    content = small_content()
    header_bytes = len(content) - 32 * 4
    path = tmp_path / "damaged.gguf"
    generator = random.Random(20)
    n_refused = 0
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(header_bytes)] = generator.choice(
                (0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256))
            )
        path.write_bytes(damaged)
        try:
            file = open_gguf(path)
        except FormatError:
            n_refused += 1
            continue
        with file:
            for info in file.tensors.values():
                assert len(file.tensor_bytes(info)) == info.n_bytes
    assert 150 < n_refused < 1500


def test_header_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeh2o.formats.gguf_cursor.MAX_HEADER_BYTES", 200)
    path = tmp_path / "long.gguf"
    strings = raw.array(raw.STRING, ["a" * 100, "b" * 100])
    for keys in (
        [key("k", raw.ARRAY, strings)],
        [key(f"k{n}", raw.STRING, text("v" * 100)) for n in range(2)],
    ):
        path.write_bytes(gguf(keys, data=DATA))
        with pytest.raises(FormatError, match=r"largest header|header would pass 200 bytes"):
            open_gguf(path)
