"""How parameters are split into fragments: by layer, by number of elements, or by name."""

from __future__ import annotations

import itertools

import pytest

from lightning_loco.schedules.staggered import layer_of, split_into_fragments

GPT = {
    "embedding.weight": 50,
    "blocks.0.attention.weight": 12,
    "blocks.0.mlp.0.weight": 20,
    "blocks.1.attention.weight": 12,
    "blocks.1.mlp.0.weight": 20,
    "blocks.2.attention.weight": 12,
    "blocks.2.mlp.0.weight": 20,
    "norm.weight": 4,
    "norm.bias": 4,
}
STARTS = dict(zip(GPT, itertools.accumulate(GPT.values(), initial=0), strict=False))


def names_in(fragment: list[range]) -> list[str]:
    """The parameters of a fragment; asserts that each is in it as a whole or not at all."""
    names = []
    for name, size in GPT.items():
        inside = [i in part for i in range(STARTS[name], STARTS[name] + size) for part in fragment]
        assert sum(inside) in (0, size)
        names += [name] if any(inside) else []
    return names


def layers_in(fragment: list[range]) -> list[str]:
    return list(dict.fromkeys(map(layer_of, names_in(fragment))))


def test_a_layer_is_a_numbered_block_or_a_module(subtests: pytest.Subtests) -> None:
    for name, layer in (
        ("model.blocks.12.mlp.0.weight", "model.blocks.12"),
        ("0.weight", "0"),
        ("stages.1.blocks.2.bias", "stages.1"),
        ("head.bias", "head"),
        ("encoder.norm.weight", "encoder.norm"),
        ("scale", ""),
    ):
        with subtests.test(name):
            assert layer_of(name) == layer


def test_strided_assigns_layers_to_fragments_in_turn() -> None:
    fragments = split_into_fragments(GPT, 2, "strided")
    assert [layers_in(fragment) for fragment in fragments] == [
        ["embedding", "blocks.1", "norm"],
        ["blocks.0", "blocks.2"],
    ]
    assert fragments[0] == [range(50), range(82, 114), range(146, 154)]


def test_contiguous_fragments_are_neighbouring_layers_of_about_the_same_size() -> None:
    fragments = split_into_fragments(GPT, 3, "contiguous")
    assert fragments == [[range(50)], [range(50, 114)], [range(114, 154)]]
    (whole,) = split_into_fragments(GPT, 1, "contiguous")
    assert whole == [range(154)]
    lopsided = split_into_fragments({"a.w": 100, "b.w": 1, "c.w": 1}, 3, "contiguous")
    assert lopsided == [[range(100)], [range(100, 101)], [range(101, 102)]]
    lopsided = split_into_fragments({"a.w": 1, "b.w": 1, "c.w": 100}, 2, "contiguous")
    assert lopsided == [[range(2)], [range(2, 102)]]


def test_even_fragments_have_equally_many_elements() -> None:
    assert split_into_fragments(GPT, 3, "even") == [
        [range(51)],
        [range(51, 102)],
        [range(102, 154)],
    ]
    one_layer = {"head.weight": 6, "head.bias": 1}
    assert split_into_fragments(one_layer, 4, "even") == [
        [range(1)],
        [range(1, 3)],
        [range(3, 5)],
        [range(5, 7)],
    ]
    with pytest.raises(ValueError, match="fragments=8 is more than the 7 trainable elements"):
        split_into_fragments(one_layer, 8, "even")


@pytest.mark.parametrize("pattern", ["strided", "contiguous"])
def test_every_element_is_in_one_fragment(pattern: str) -> None:
    for sizes in itertools.product((0, 1, 7), (1, 5), (2, 30), (1, 3), (0, 4)):
        named = {f"blocks.{i}.weight": size for i, size in enumerate(sizes)}
        layers = sum(map(bool, sizes))
        for count in range(1, layers + 1):
            fragments = split_into_fragments(named, count, pattern)
            assert all(map(any, fragments))
            covered = sorted(i for fragment in fragments for part in fragment for i in part)
            assert covered == list(range(sum(sizes)))
            for fragment in fragments:
                gaps = [b.start - a.stop for a, b in itertools.pairwise(fragment)]
                assert min(gaps, default=1) > 0  # adjacent slices are merged
        with pytest.raises(ValueError, match=f"more than the {layers} layers"):
            split_into_fragments(named, layers + 1, pattern)


def test_fragments_by_name() -> None:
    first, second = split_into_fragments(GPT, 2, ["attention", "mlp|norm|embedding"])
    assert names_in(first) == [name for name in GPT if "attention" in name]
    assert names_in(second) == [name for name in GPT if "attention" not in name]


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["attention", "mlp|norm"], r"'embedding.weight' must match one pattern and matches none"),
        (["block", "mlp|norm|emb"], r"'blocks.0.mlp.0.weight' .* matches 'block' and 'mlp\|norm"),
        (["", "head"], "No trainable parameter matches the pattern 'head'"),
    ],
)
def test_a_parameter_belongs_to_one_fragment(patterns: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        split_into_fragments(GPT, 2, patterns)
