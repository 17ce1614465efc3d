"""Changes the statements of layers for the parameters that `model.frozen` names.

A frozen parameter is kept in the compute dtype, without a master, moments and gradients. A name is
that of the layer and that of the parameter: `block_003/query_DHK`, `head/norm/scale_D`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import Kind, WeightProduct


def freeze(kinds: Mapping[str, Kind], patterns: Sequence[str]) -> dict[str, Kind]:
    """The kinds of a model's layers with the named parameters frozen; equal layers share a kind.

    Args:
      kinds: of the layers, by name.
      patterns: shell patterns, each for whole names.

    Raises:
      ConfigError: a pattern matches no parameter, or nothing trains any more.
    """
    names = [
        f"{layer}/{parameter.name}"
        for layer, kind in kinds.items()
        for parameter in kind.parameters
    ]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            problem = "matches no parameter: a pattern is for the whole of a name"
            fix = f"use names such as {names[0]} or {names[len(names) // 2]}; * is any text"
            raise ConfigError("model.frozen", problem, found=pattern, fix=fix)
    frozen = {name for name in names if any(fnmatchcase(name, p) for p in patterns)}
    made: dict[Kind, Kind] = {}
    found = {layer: _with_frozen(layer, kind, frozen) for layer, kind in kinds.items()}
    if not any(parameter.trains for kind in found.values() for parameter in kind.parameters):
        fix = "leave patterns out, until something is left to train"
        raise ConfigError("model.frozen", "freezes all parameters", found=list(patterns), fix=fix)
    return {layer: made.setdefault(kind, kind) for layer, kind in found.items()}


def _with_frozen(layer: str, kind: Kind, frozen: set[str]) -> Kind:
    parameters = tuple(
        replace(parameter, trains=False) if f"{layer}/{parameter.name}" in frozen else parameter
        for parameter in kind.parameters
    )
    sizes = {parameter.name: parameter.size() for parameter in parameters}
    trained = {parameter.name for parameter in parameters if parameter.trains}
    trained |= {path for path in kind.borrows if path not in frozen}
    products = tuple(part for product in kind.products for part in _parts(product, trained, sizes))
    return replace(kind, parameters=parameters, products=products)


def _parts(
    product: WeightProduct, trained: set[str], sizes: Mapping[str, int]
) -> Iterator[WeightProduct]:
    """Splits a product by its weights: those that train, and the frozen ones."""
    if product.weight:  # one parameter has all of them
        yield replace(product, trains=product.weight in trained)
        return
    own = [name for name in product.weights if name in trained]
    if len(own) in (0, len(product.weights)):
        yield replace(product, trains=bool(own or (trained and not product.weights)))
        return
    columns = sum(sizes[name] for name in own) // product.depth
    yield replace(product, columns=columns, weights=tuple(own))
    others = tuple(name for name in product.weights if name not in own)
    rest = product.columns - columns
    yield replace(product, columns=rest, weights=others, trains=False)
