"""Layers that are read back from a folder."""

from collections.abc import Iterator

from holmesjax.hugging_face import export, folder


def layers_of(weights: folder.Weights) -> Iterator[export.Layer]:
    for layer, places in weights.places.items():
        yield layer, {name: weights.read(layer, name) for name in places}
