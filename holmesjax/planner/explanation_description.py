"""An explanation of a plan as lines for the console."""

from collections.abc import Sequence

from holmesjax.planner.explain import Alternative, Explanation, Ranked
from holmesjax.units import show


def describe(explanation: Explanation) -> list[str]:
    """Lines of an explanation for the console."""
    best, by_dollars = explanation.best[0], explanation.by_dollars
    has_prices = best.dollars is not None
    lines = ["the best plans, side by side"]
    worse = "dearer" if by_dollars else "slower"
    header = ("", "step", *(("dollars",) if has_prices else ()), worse, "stages")
    rows: list[tuple[str, ...]] = [(*header, "microbatches", "schedule", "memory", "what binds it")]
    for number, plan in enumerate(explanation.best, start=1):
        factor = _factor(plan, best, by_dollars)
        rows.append(
            (
                str(number),
                show(plan.step_s, "s"),
                *((_price(plan.dollars),) if has_prices else ()),
                f"{factor - 1:.1%}" if number > 1 and factor else "",
                plan.pipeline,
                f"{plan.microbatches}, {plan.checkpointing}",
                plan.schedule,
                f"{plan.memory_share:.0%}",
                ", ".join(f"{what} {share:.0%}" for what, share in plan.binds.items()),
            )
        )
    lines += [f"  {line}" for line in aligned(rows)]
    for title, kernels in (
        ("what will compute attention, and its time in a step", explanation.attention),
        ("what will do AdamW's step, and the time of the update", explanation.update),
        ("the tokens that tensor leaves to a device, and its exposed time", explanation.sequences),
        ("what backwards compute again, and its time in a step", explanation.recomputed),
    ):
        if kernels:
            lines.append(title)
            told = [(kernel.where, show(kernel.step_s, "s"), kernel.what) for kernel in kernels]
            lines += [f"  {line}" for line in aligned(told)]
    for title, alternatives in (
        ("in place of the plan", explanation.against),
        ("what each cluster is worth", explanation.clusters),
        ("what upgrades would buy", explanation.upgrades),
    ):
        if alternatives:
            lines.append(title + ", with the pinned settings" * explanation.is_pinned)
            compared = [(a.what, *_compared(a, best, by_dollars, has_prices)) for a in alternatives]
            lines += [f"  {line}" for line in aligned(compared)]
    return lines


def _factor(plan: Ranked | Alternative, best: Ranked, by_dollars: bool) -> float | None:
    """How much longer its step is, or how much dearer; None where one has no price."""
    if by_dollars:
        return plan.dollars / best.dollars if plan.dollars and best.dollars else None
    assert plan.step_s is not None, "what is not possible is not compared"
    return plan.step_s / best.step_s


def _price(dollars: float | None) -> str:
    return "no price" if dollars is None else f"{dollars:.3g}"


def _compared(
    alternative: Alternative, best: Ranked, by_dollars: bool, has_prices: bool
) -> tuple[str, ...]:
    """The step of an alternative, its dollars where there are prices, and how it differs."""
    if alternative.step_s is None:
        return ("", *(("",) if has_prices else ()), alternative.why)
    more, less = ("dearer", "cheaper") if by_dollars else ("longer", "shorter")
    factor = _factor(alternative, best, by_dollars)
    text = "no difference"
    if factor is None:
        text = ""
    elif factor >= 2:
        text = f"{factor:.3g} times as {'dear' if by_dollars else 'long'}"
    elif abs(factor - 1) >= 0.0005:
        text = f"{abs(factor - 1):.1%} {more if factor > 1 else less}"
    price = (_price(alternative.dollars),) if has_prices else ()
    return (show(alternative.step_s, "s"), *price, text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of texts, as wide as they need to be.

    >>> aligned([("a", "bcd", "e"), ("fg", "h", "")])
    ['a   bcd  e', 'fg  h']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    )
    return [line.rstrip() for line in padded]
