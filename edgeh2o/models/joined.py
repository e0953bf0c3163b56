"""Matrices that a file has joined: llama.cpp's converter does so for any architecture, if asked to.

Q, K and V become one matrix (``--fuse-qkv``), and so do the gate and up matrices of experts
(``--fuse-gate-up-exps``). What is joined is bound as if it were not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import FormatError
from ..formats.gguf_header import TensorInfo
from ..formats.metadata import quote
from .tensors import TensorBinding, TensorPart, TensorRule, bind_tensors, expand_rules

if TYPE_CHECKING:
    from .hyperparameters import Hyperparameters

_QKV = ".attn_qkv."
_GATE_UP, _GATE, _UP = ".ffn_gate_up_exps.", ".ffn_gate_exps.", ".ffn_up_exps."


def bind_joined(
    tensors: Mapping[str, TensorInfo],
    rules: Iterable[TensorRule],
    shape: Hyperparameters,
    *,
    architecture: str,
    interleaved: bool,
    read_elsewhere: Iterable[str],
) -> list[TensorBinding]:
    """As ``bind_tensors``, also of files that have joined what the rules have one by one."""
    rules = joined_experts(tensors, rules)
    return bind_tensors(
        _split_qkv(tensors, rules, shape),
        rules,
        shape,
        architecture=architecture,
        interleaved=interleaved,
        read_elsewhere=read_elsewhere,
    )


def joined_experts(names: Iterable[str], rules: Iterable[TensorRule]) -> tuple[TensorRule, ...]:
    """The rules, with one matrix of gate and up where a file of these names has that."""
    rules = tuple(rules)
    known = {rule.name for rule in rules}
    if not any(_GATE_UP in name for name in names):
        return rules
    joined = []
    for rule in rules:
        name = rule.name.replace(_GATE, _GATE_UP)
        up = next((each for each in rules if each.name == rule.name.replace(_GATE, _UP)), None)
        if name == rule.name or name in known or up is None or len(rule.shape) < 3:
            joined.append(rule)
            continue
        parts = tuple(
            part
            for each in (rule, up)
            for part in each.parts or (TensorPart(each.name, "ffn_dim"),)
        )
        width, _, n_experts = rule.shape
        joined.append(
            replace(rule, name=name, shape=(width, "gate_up_dim", n_experts), parts=parts)
        )
    gone = {rule.name.replace(_GATE_UP, _UP) for rule in joined if rule.name not in known}
    return tuple(rule for rule in joined if rule.name not in gone)


def is_joined_qkv(name: str, rules: Mapping[str, object]) -> bool:
    """Whether a tensor is a matrix of Q, K and V, which the rules by their names have singly."""
    return name.endswith(f"{_QKV}weight") and bool(_parts_of(name, rules))


def _parts_of(name: str, rules: Mapping[str, object]) -> list[str]:
    """The names of Q, K and V where the rules have those and not a joint tensor, else none."""
    if _QKV not in name or name in rules:
        return []
    parts = [name.replace(_QKV, f".attn_{letter}.") for letter in "qkv"]
    return parts if all(part in rules for part in parts) else []


def _split_qkv(
    tensors: Mapping[str, TensorInfo], rules: Sequence[TensorRule], shape: Hyperparameters
) -> Mapping[str, TensorInfo]:
    """The tensors, with those of Q, K and V, one after another in the file, in place of joint ones.

    Raises FormatError for one of another shape.
    """
    if not any(_QKV in name for name in tensors):
        return tensors
    by_name = expand_rules(rules, shape.own_layers)
    split: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        parts = _parts_of(name, by_name)
        if not parts:
            split[name] = info
            continue
        if twice := [part for part in parts if part in tensors]:
            raise FormatError(
                f"the file has both {quote(name)} and {quote(twice[0])}; it was converted wrongly"
            )
        layer = by_name[parts[0]][1]
        sizes = shape.sizes(shape.own_layers[layer])
        counts = [sizes[by_name[part][0].shape[-1]] for part in parts]
        n_together = info.shape[-1]
        if sum(counts) != n_together or info.n_bytes % n_together:
            raise FormatError(
                f"tensor {quote(name)} has shape {list(info.shape)}, but the hyperparameters make "
                f"{' + '.join(map(str, counts))} of it; the file is damaged or was converted "
                "wrongly"
            )
        offset, unit = info.offset, info.n_bytes // n_together
        for part, count in zip(parts, counts, strict=True):
            split[part] = replace(
                info,
                shape=(*info.shape[:-1], count),
                n_bytes=count * unit,
                offset=offset,
            )
            offset += count * unit
    return split
