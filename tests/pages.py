"""The pages of the documents."""

from holmesjax.config import CHECKOUT

PAGES = [
    *(CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted(CHECKOUT.glob("docs/*.md")),
    *sorted(CHECKOUT.glob("docs/design/*.md")),
]
