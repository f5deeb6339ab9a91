"""Fragments of a model: which parameters are exchanged together, by layer or by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

Layers = dict[str, list[str]]


def stretches(
    sizes: Mapping[str, int], fragments: int, pattern: str | Sequence[str]
) -> list[list[range]]:
    """The stretches of the flat vector that each fragment consists of.

    Args:
        sizes: Elements of each parameter by its name, in the order of the vector.
        fragments: How many.
        pattern: How layers or parameters become fragments, as in
            :class:`~lightning_loco.schedules.Staggered`.

    Raises:
        ValueError: If there are too few layers or elements, or a parameter belongs to no fragment
            or several.

    Example:
        >>> stretches({"0.weight": 6, "0.bias": 2, "1.weight": 3}, 2, "strided")
        [[range(0, 8)], [range(8, 11)]]
    """
    if pattern == "even":
        return _even(sum(sizes.values()), fragments)
    named = [name for name, size in sizes.items() if size]
    if isinstance(pattern, str):
        numbers = _by_layer({name: sizes[name] for name in named}, fragments, pattern)
    else:
        numbers = _by_name(named, pattern)
    found: list[list[range]] = [[] for _ in range(fragments)]
    position = 0
    for name in named:
        own, begin, position = found[numbers[name]], position, position + sizes[name]
        if own and own[-1].stop == begin:
            begin = own.pop().start
        own.append(range(begin, position))
    return found


def layer_of(name: str) -> str:
    """The layer of a parameter: its numbered block, or else its module.

    Example:
        >>> [layer_of(name) for name in ("blocks.3.mlp.0.weight", "head.bias", "scale")]
        ['blocks.3', 'head', '']
    """
    *modules, _ = name.split(".")
    numbered = [depth for depth, module in enumerate(modules) if module.isdigit()]
    return ".".join(modules[: numbered[0] + 1] if numbered else modules)


def _even(numel: int, fragments: int) -> list[list[range]]:
    """Neighbours together, equally many elements each, wherever layers end."""
    if fragments > numel:
        raise ValueError(
            f"fragments={fragments} is more than the {numel} trainable elements of the model. Take "
            f"at most {numel} fragments."
        )
    borders = [numel * index // fragments for index in range(fragments + 1)]
    return [[range(begin, end)] for begin, end in itertools.pairwise(borders)]


def _by_layer(sizes: Mapping[str, int], fragments: int, pattern: str) -> dict[str, int]:
    """The fragment of each parameter, where layers stay whole."""
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        layers[layer_of(name)] = layers.get(layer_of(name), 0) + size
    if fragments > len(layers):
        shown = ", ".join(repr(layer) for layer in list(layers)[:8])
        raise ValueError(
            f"fragments={fragments} is more than the {len(layers)} layers with trainable "
            f"parameters ({shown}). Take at most {len(layers)} fragments, or say by regular "
            "expressions which parameters belong to each: pattern=[...]."
        )
    chosen = _contiguous(list(layers.values()), fragments) if pattern == "contiguous" else None
    numbers = {
        layer: index % fragments if chosen is None else chosen[index]
        for index, layer in enumerate(layers)
    }
    return {name: numbers[layer_of(name)] for name in sizes}


def _contiguous(sizes: list[int], fragments: int) -> list[int]:
    """The fragment of each layer: neighbours together, about the same number of elements each."""
    total, numbers, before, end = sum(sizes), [0] * len(sizes), 0, 0
    for fragment in range(fragments - 1):
        wanted = total * (fragment + 1) / fragments
        last = len(sizes) - (fragments - fragment - 1)  # leaves a layer for each that follows
        begin = end
        while end < last and (
            end == begin or abs(before + sizes[end] - wanted) <= abs(before - wanted)
        ):
            numbers[end] = fragment
            before += sizes[end]
            end += 1
    return [*numbers[:end], *[fragments - 1] * (len(sizes) - end)]


def _by_name(names: list[str], patterns: Sequence[str]) -> dict[str, int]:
    """The fragment of each parameter: that of the only pattern found in its name."""
    numbers: dict[str, int] = {}
    for name in names:
        found = [i for i, pattern in enumerate(patterns) if re.search(pattern, name)]
        if len(found) != 1:
            which = "none" if not found else " and ".join(repr(patterns[i]) for i in found)
            raise ValueError(
                f"Parameter {name!r} must match one pattern and matches {which} of "
                f"{list(patterns)}. Every trainable parameter belongs to one fragment."
            )
        numbers[name] = found[0]
    for fragment, pattern in enumerate(patterns):
        if fragment not in numbers.values():
            raise ValueError(f"No trainable parameter matches the pattern {pattern!r}.")
    return numbers
