"""Ways to train over several clusters, and the planner's choice between them. No search here.

A way is a pipeline, or islands that meet every few steps. Times are for equal tokens. Islands need
more tokens for the same loss, and their priced step has the time of these too.
"""

from dataclasses import dataclass

from holmesjax.config import Config
from holmesjax.config.island_checks import OF_ISLANDS
from holmesjax.plan.plan import Plan
from holmesjax.units import show

# Names of the clusters of each island.
Grouping = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to train over all clusters."""

    what: str
    step_s: float | None = None  # None: not possible
    sent_bytes: float = 0.0  # in a step, one way, where most are sent: by an island, or over a link
    exposed_s: float = 0.0  # of a step, in which devices wait for what is sent
    hidden_s: float = 0.0  # of a step, in which they compute while it is sent
    more_tokens: float = 0.0  # for the same loss, as a share of those of a pipeline
    why: str = ""  # it is not possible

    @property
    def priced_s(self) -> float:
        """The seconds of a step, and of the tokens that it takes more."""
        assert self.step_s is not None, "the way is possible"
        return self.step_s * (1.0 + self.more_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenWay:
    """The way that the planner has chosen where `parallel.across` is auto."""

    asked: Config  # with auto
    config: Config  # with what was chosen in its place
    plan: Plan
    ways: tuple[Way, ...] = ()  # that were compared, the chosen one first; none: only a pipeline
    num_slower: int = 0  # groupings that were not planned: others are faster, or look so

    def describe(self) -> str:
        """The choice in a line for the console."""
        if not self.ways:
            why = "islands train otherwise, and plan.allow has no local_updates"
            text = f"chosen      no islands: {why}"
            parallel = self.asked.parallel
            unused = [name for name in OF_ISLANDS if getattr(parallel, name) is not None]
            if unused:
                text += f"; not used: {', '.join(f'parallel.{name}' for name in unused)}"
            return text
        best, *others = [way for way in self.ways if way.step_s is not None]
        text = f"chosen      {best.what}: {show(best.priced_s, 's')} with its price"
        for way in others[:1]:
            text += f"; then {way.what}: {show(way.priced_s, 's')}"
        refused = [way for way in self.ways if way.step_s is None]
        if refused and not others:  # or a mistake in a setting would look like a choice
            text += f"; {refused[0].what}: {refused[0].why}"
        return text


def more_tokens(rate: float, islands: int, every: int) -> float:
    """The share of tokens that islands need more than one pipeline for the same loss.

    It grows in proportion to the islands after the first, as the losses of NoLoCo's table do (arXiv
    2506.10911), and to the steps between meetings, as those of Streaming DiLoCo do from 30 to 100
    steps (2501.18512). `docs/islands_planned.md` says how the default rate comes from these.

    >>> more_tokens(0.1, 2, 100), more_tokens(0.1, 1, 100), more_tokens(0.1, 5, 50)
    (0.1, 0.0, 0.2)

    Args:
      rate: `plan.islands_more_tokens`.
      islands: of the run.
      every: steps from one meeting to the next.
    """
    return rate * (islands - 1) * every / 100.0
