"""The choice between a pipeline over clusters and islands: against brute force, and its bounds."""

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax import job, job_description
from holmesjax.config import OuterConfig, PlanConfig
from holmesjax.errors import ConfigError, HolmesError, Mistakes, PlanError
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.ways import ChosenWay, more_tokens
from holmesjax.planner import across, islands_explained
from holmesjax.planner.groupings import groupings
from holmesjax.planner.islands import plan_islands
from holmesjax.planner.islands_explained import describe_run, explain_run
from holmesjax.planner.planner import choose, make_plan
from launch.__main__ import main
from tests.clusters import make_cluster, make_config, make_topology

RUN = "configs/runs/quickstart.yaml"
ALLOWED = PlanConfig(allow=("local_updates",))
AUTO = {"across": "auto", "microbatches": 2, "data": 2, "tensor": 1, "fsdp": 1, "schedule": "1f1b"}
SIZES = {"num_layers": 2, "width": 512, "num_heads": 8, "vocab_size": 8192}
SLOW = {
    "train.steps": 20,
    "train.eval_every": 0,
    "model.num_layers": 2,
    "parallel": None,
    "parallel.microbatches": 8,
    "parallel.tensor": 1,
    "parallel.schedule": "1f1b",
    "parallel.across": "auto",
}


def run_config(plan=ALLOWED, model=None, **parallel):
    train = {"global_batch": 24, "steps": 20}
    settings = {**AUTO, "activation_checkpointing": "none", **parallel}
    config = make_config(model={**SIZES, **(model or {})}, train=train, parallel=settings)
    return dataclasses.replace(config, plan=plan)


def clusters(count, speed=0.01, **sizes):
    return [make_cluster(name, "infiniband", (2,), speed=speed, **sizes) for name in "abcd"[:count]]


def slow_link(folder):
    """The topology of two CPUs, one of them slower, with a link of 10 Mb/s."""
    fast, link = "{float32: 150 GFLOP/s, bfloat16: 50 GFLOP/s}", "25 Gb/s"
    text = Path("configs/topologies/two_cpus.yaml").read_text().replace(link, "10 Mb/s")
    first, second = text.split("- name: roce")
    second = second.replace(fast, "{float32: 100 GFLOP/s, bfloat16: 30 GFLOP/s}")
    (path := folder / "slow.yaml").write_text(f"{first}- name: roce{second}")
    return str(path)


def labelled(names):
    """All groupings, from all ways to give each name the number of an island, or none."""
    found = set()
    for labels in itertools.product(range(len(names) + 1), repeat=len(names)):
        islands = {
            n: tuple(x for x, k in zip(names, labels, strict=True) if k == n) for n in labels
        }
        islands.pop(0, None)
        if len(islands) > 1:
            found.add(frozenset(islands.values()))
    return found


def test_all_groupings_of_few_clusters_are_there_once():
    equal = lambda a, b: 1.0
    for names in ("a", "ab", "abcd"):
        found = [frozenset(grouping) for grouping in groupings(names, equal)]
        assert len(found) == len(set(found))
        assert set(found) == labelled(names)
    assert len(list(groupings("abcdef", equal))) == 813


def test_many_clusters_are_joined_by_the_rates_of_their_links():
    """Two pairs at 3, one more cluster at 2, and all others at 1."""
    rates = {("a", "b"): 3.0, ("f", "g"): 3.0, ("b", "c"): 2.0}
    found = list(groupings("abcdefg", lambda a, b: rates.get((a, b), 1.0)))
    texts = [" ".join("".join(island) for island in grouping) for grouping in found]
    assert texts == ["a b c d e f g", "ab c d e fg", "abc d e fg"]


@pytest.mark.parametrize(
    "shares, speeds", [(None, (0.01, 0.007, 0.009)), ("speed", (0.01, 0.005, 0.005))]
)
def test_the_choice_is_the_best_of_all_that_a_run_could_ask_for(shares, speeds):
    """Three unlike clusters on slow links: each grouping, with all settings of meetings."""
    named = zip("abc", speeds, strict=True)
    unlike = [make_cluster(name, "roce", (2,), speed=speed) for name, speed in named]
    topology = make_topology(*unlike, ethernet_bytes_per_s=3e7)
    known, timed = {}, {}

    def make_once(config, machines):
        key = tuple(c.name for c in machines.clusters), config.train.global_batch
        known[key] = known.get(key) or make_plan(config, machines)
        return known[key]

    ways = itertools.product(labelled("abc"), (10, 20), across.FRAGMENTS[:3], across.DELAYS)
    for grouping, every, parts, delay in ways:
        islands = tuple(sorted(grouping))
        if every % parts == 0 and delay <= every // parts:
            settings = {"islands": islands, "every": every, "fragments": parts, "delay": delay}
            config = run_config(across="local_updates", shares=shares, **settings)
            plan = plan_islands(config, topology, make_once, USABLE_MEMORY)
            price = 1.0 + 0.1 * (len(islands) - 1) * every / 100
            timed[tuple(settings.values())] = plan.step_time_s * price
    best = choose(run_config(shares=shares), topology)
    assert best.plan.islands
    assert (len(set(best.plan.batch_shares)) > 1) == (shares == "speed")
    assert min(timed.values()) <= best.ways[0].priced_s <= min(timed.values()) * across.SAME
    own = best.config.parallel
    key = tuple(sorted(own.islands)), own.every, own.fragments, own.delay
    assert best.ways[0].priced_s == pytest.approx(timed[key])
    assert own.blend == (across.BLEND if own.delay else None)
    pipeline = make_plan(run_config(across="pipeline"), topology)
    assert pipeline.step_time_s > best.ways[0].priced_s
    assert pipeline.step_time_s in [way.step_s for way in best.ways]


def test_a_slower_link_leads_from_a_pipeline_to_islands_to_one_cluster():
    """One cluster is slower: a pipeline gives it fewer layers, and islands as much as the other."""
    unlike = clusters(1, speed=0.015) + clusters(2)[1:]
    rates = [10.0**n for n in (10, 9, 8, 7, 6)]
    slower = [make_topology(*unlike, ethernet_bytes_per_s=rate) for rate in rates]
    choices = [choose(run_config(microbatches=6), topology) for topology in slower]
    count = lambda choice: len(choice.plan.islands)
    has = {0: "pipeline", 2: "islands"}
    found = [
        "alone" if choice.ways[0].what.endswith("alone") else has[count(choice)]
        for choice in choices
    ]
    assert list(dict.fromkeys(found)) == ["pipeline", "islands", "alone"]
    every = [choice.config.parallel.every for choice in choices if choice.plan.islands]
    assert every == sorted(every)
    dear = dataclasses.replace(ALLOWED, islands_more_tokens=1000.0)
    priced = choose(run_config(dear, microbatches=6), slower[found.index("islands")])
    assert not priced.plan.islands


def test_near_clusters_are_one_island_where_one_holds_no_replica(monkeypatch):
    """Two pairs with fast links, and slow ones between them; the model needs two clusters."""
    topology = make_topology(*clusters(4), ethernet_bytes_per_s=1e8)
    near = {pair: dataclasses.replace(topology.links[pair], bandwidth_bytes_per_s=1e10)
            for pair in (("a", "c"), ("c", "a"), ("b", "d"), ("d", "b"))}  # fmt: skip
    topology = dataclasses.replace(topology, links={**topology.links, **near})
    monkeypatch.setattr(across, "MOST_MIXTURES", 1)  # refused ones do not count
    monkeypatch.setattr(across, "MOST_REFUSED", 25)

    def make(config, machines):
        if [cluster.name for cluster in machines.clusters] not in (["a", "c"], ["b", "d"]):
            raise PlanError("memory", "is too small", found="0 B", fix="more")
        return make_plan(config, machines)

    choice = across.choose(run_config(), topology, make, USABLE_MEMORY, lambda _: None)
    assert sorted(choice.config.parallel.islands) == [("a", "c"), ("b", "d")]
    single = [way for way in choice.ways if way.what.startswith("islands a | ")]
    assert single
    assert {way.step_s for way in single} == {None}
    assert "not possible: memory: is too small" in [way.why for way in single]


def test_a_run_without_any_way_is_told_all_reasons():
    """The pipeline's with its remedy, which nothing but the last refusal looks for."""
    topology, asked = make_topology(*clusters(2)), []

    def refuse(fix):
        def make(config, machines):
            asked.append(fix)
            raise PlanError("memory", "is too small", found="0 B", fix=fix)

        return make

    for plan in (ALLOWED, PlanConfig()):
        config = run_config(plan)
        with pytest.raises(PlanError) as caught:
            across.choose(
                config, topology, refuse("more"), USABLE_MEMORY, lambda _: None, refuse("half")
            )
        assert caught.value.fix == "half"
        assert asked.pop() == "half"
        assert "half" not in asked
        words = "islands a | b: not possible: memory: is too small"
        assert (words in str(caught.value.found)) == bool(plan.allow)


def test_a_delay_that_leaves_too_little_room_is_compared_by_its_plan(monkeypatch):
    """With it more layers compute again, so that meetings without it are faster."""
    config = run_config()
    plan = make_plan(dataclasses.replace(config, parallel=run_config(across="pipeline").parallel),
                     make_topology(*clusters(1)))  # fmt: skip
    topology = make_topology(*clusters(2), ethernet_bytes_per_s=1e7)

    settings = [
        run_config(
            across="local_updates", islands=(("a",), ("b",)), every=200, delay=delay
        ).parallel
        for delay in (0, 200)
    ]
    islands = make_plan(dataclasses.replace(config, parallel=settings[0]), topology).islands
    paths = across.MeetingPaths(config, topology, islands)

    def planned(own, machines, make, usable_memory, *, is_refused):
        slower = 3.0 if own.parallel.delay else 1.0
        if own.parallel.delay and is_refused:  # by the checks of settings of unlike shares
            raise Mistakes([ConfigError("train", "cannot be", found="", fix="")])
        cost = across.meeting_cost(own, paths, plan.step_time_s)
        step_s = plan.step_time_s * slower + cost.exposed_s / cost.every
        return dataclasses.replace(plan, step_time_s=step_s, meeting=cost, islands=islands)

    costs = [
        across.meeting_cost(dataclasses.replace(config, parallel=parallel), paths, plan.step_time_s)
        for parallel in settings
    ]
    assert costs[0].exposed_s > costs[1].exposed_s * 2  # else the delay has nothing to hide
    for is_refused in (False, True):
        made = functools.partial(planned, is_refused=is_refused)
        monkeypatch.setattr(across, "plan_islands", made)
        found, _ = across._with_meetings(config, topology, None, USABLE_MEMORY, settings)
        assert found.parallel.delay == 0


def test_no_plan_is_faster_than_the_bound_of_its_grouping():
    """Neither in fp8, whose peak is another, nor where kernels leave pairs of attention out."""
    bound = lambda config, topology: across._least_s(config, topology, (("a",),))
    topology = make_topology(*clusters(1))
    device = topology.clusters[0].nodes[0].device
    short = run_config()
    long = run_config(model={"context_length": 4 * short.model.context_length})
    assert bound(long, topology) == pytest.approx(4 * bound(short, topology))
    peaks = {**device.peak_flop_per_s, "float8": 2 * max(device.peak_flop_per_s.values())}
    [cluster] = clusters(1)
    faster = dataclasses.replace(device, peak_flop_per_s=peaks)
    nodes = tuple(dataclasses.replace(node, device=faster) for node in cluster.nodes)
    fp8 = make_topology(dataclasses.replace(cluster, nodes=nodes))
    assert bound(short, fp8) == pytest.approx(bound(short, topology) / 2)


def test_islands_that_the_checks_of_settings_refuse_have_no_bound():
    """Six sequences are no microbatches of both replicas: planning the islands says so."""
    config = run_config()
    train = dataclasses.replace(config.train, global_batch=12)
    grouping = (("a", "b"), ("c",))
    config = dataclasses.replace(config, train=train)
    assert across._least_alone_s(config, make_topology(*clusters(3)), grouping, make_plan) == 0.0


def test_what_the_checks_of_settings_refuse_is_a_way_that_is_not_possible():
    """Equal shares of 12 sequences are no microbatches of two replicas, and dollars no islands."""
    topology = make_topology(*clusters(1, speed=0.02), *clusters(2)[1:])
    config = run_config(across="local_updates", shares="speed", every=10)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=12))
    plan = make_plan(config, topology)
    assert plan.batch_shares == (2, 1)
    alike = islands_explained._equal_islands(plan, config, topology, str, USABLE_MEMORY)
    assert [way.why for way in alike] == [
        "not possible: must be a multiple of parallel.data * parallel.microbatches = 2 * 2 = 4"
    ]
    dollars = run_config(plan=PlanConfig(budget_dollars=1.0))
    choice = ChosenWay(asked=dollars, config=dollars, plan=plan.islands[0])
    _, [note] = islands_explained._compared(choice, topology, str, USABLE_MEMORY)
    assert note.startswith("islands are not possible: plan.allow: cannot have local_updates")


def test_late_rules_are_compared_with_late_meetings():
    """Those of a run that says other steps between meetings; none of them stops all."""
    topology = make_topology(*clusters(2), ethernet_bytes_per_s=1e7)
    config_of = lambda every: run_config(
        across="local_updates", every=every, outer=OuterConfig(rule="eager")
    )
    plan_of = lambda every: make_plan(config_of(every), topology)
    ways = list(islands_explained._ways(plan_of(10), config_of(10), topology))
    assert [way.step_s for way in ways] == pytest.approx(
        [plan_of(every).step_time_s for every in (10, 1, 100)]
    )
    assert all(way.hidden_s for way in ways)


def test_stages_over_several_clusters_are_no_cluster_alone():
    stage = SimpleNamespace(cluster="ib+roce")
    plan = SimpleNamespace(
        stages=[stage], chunks=[(0, None)], step_time_s=1.0, shares={}, microbatches=1,
        boundary_bytes=8.0,
    )  # fmt: skip
    assert across.way_of_pipeline(plan).what == "stages over the links"


def test_mixtures_that_islands_cannot_be_are_refused_and_explained(capsys):
    """Stages of an island cannot share the token table, and 10 sequences have no equal parts."""
    both = [make_cluster(name, "infiniband", (4,), speed=0.01) for name in "ab"]
    topology = make_topology(*both, ethernet_bytes_per_s=1e6)
    tied = run_config(model={"tied_embeddings": True}, stages=2)
    choice = choose(tied, topology)
    assert not choice.plan.islands
    assert "share the token table" in choice.ways[-1].why
    assert "a+b alone" not in choice.describe()
    assert "islands a | b: not possible: island 0: cannot share" in choice.describe()
    text = "\n".join(describe_run(explain_run(choice.config, topology, choice=choice)))
    assert "islands a | b: not possible: island 0: cannot share" in text
    odd = dataclasses.replace(tied, train=dataclasses.replace(tied.train, global_batch=20))
    assert "must be a multiple of" in choose(odd, topology).ways[-1].why
    three = choose(dataclasses.replace(run_config(), train=odd.train), make_topology(*clusters(3)))
    mixed = [way.why for way in three.ways if way.what.startswith("islands a+c | b")]
    assert mixed == [
        "not possible: train.global_batch: must be a multiple of "
        "parallel.data * parallel.microbatches = 2 * 2 = 4"
    ]
    lacking = dataclasses.replace(tied.train, param_dtype="bfloat16")
    choice = choose(dataclasses.replace(tied, train=lacking), topology)
    assert "must be float32" in choice.ways[-1].why


def test_islands_are_never_chosen_without_being_allowed(tmp_path):
    """The explanation says what they would have given."""
    settings = {**SLOW, "topology": slow_link(tmp_path)}
    never = job.load(RUN, settings)
    assert never.config.parallel.across == "pipeline"
    assert never.plan == job.load(RUN, {**settings, "parallel.across": "pipeline"}).plan
    assert "plan.allow has no local_updates" in "\n".join(job_description.describe(never))
    pinned = job.load(RUN, {**settings, "parallel.every": 10})
    assert "not used: parallel.every" in "\n".join(job_description.describe(pinned))
    allowed = {"parallel.across": "pipeline", "plan.allow": ["local_updates"]}
    unused = job.load(RUN, {**settings, **allowed})
    assert "plan.allow: not used" in "\n".join(job_description.describe(unused))
    found = explain_run(never.config, never.topology, choice=never.choice)
    assert not found.clusters
    assert any(way.more_tokens for way in found.ways)
    text = "\n".join(describe_run(found))
    assert "islands need plan.allow=[local_updates]" in text
    assert "islands ib | roce, every " in text


def test_a_run_that_leaves_the_choice_to_the_planner_has_what_was_chosen(tmp_path):
    """The plan is that of a run that says it."""
    settings = {**SLOW, "plan.allow": ["local_updates"], "topology": slow_link(tmp_path)}
    found = job.load(RUN, settings)
    assert "chosen      islands ib | roce, every " in "\n".join(job_description.describe(found))
    assert found.choice.asked.parallel.across == "auto"
    own = found.config.parallel
    names = ("across", "every", "fragments", "delay", "blend")
    told = {f"parallel.{name}": getattr(own, name) for name in names}
    assert job.load(RUN, {**settings, **told}).plan == found.plan


def test_the_price_is_that_of_published_losses():
    """Streaming DiLoCo, 1B parameters, 100 steps: 0.01 more loss, and 0.15 less of 4 times more."""
    tokens = math.expm1(0.01 / (0.15 / math.log(4)))
    assert more_tokens(PlanConfig().islands_more_tokens, 2, 100) == pytest.approx(tokens, abs=0.005)


REFUSED = {
    "plan.allow": {"plan.allow": ["local_updates"], "plan.objective": "tokens_per_dollar"},
    "parallel.clusters": {"parallel.clusters": ["ib", "roce"]},
    "parallel.fragments": {"parallel.every": 10, "parallel.fragments": 3},
    "parallel.outer.momentum": {"parallel.outer": {"rule": "noloco", "momentum": 0.9}},
    "parallel.outer.nesterov": {"parallel.outer": {"rule": "co2", "nesterov": False}},
    "parallel.delay": {"parallel.outer": {"rule": "eager"}, "parallel.delay": 2},
    "parallel.islands": {"parallel.islands": [["ib"], ["rocee"]]},
    "train.eval_every": {"parallel.every": 30, "train.eval_every": 50},
}


@pytest.mark.parametrize("where", REFUSED)
def test_settings_that_leave_no_choice_are_refused(where):
    """Or else a mistake would be another training."""
    with pytest.raises(HolmesError, match=where):
        job.load(RUN, {**SLOW, **REFUSED[where]})


def test_machines_that_would_be_others_are_chosen_for_again(capsys, tmp_path):
    """A fast link in place of a slow one gives a pipeline in place of islands."""
    words = [f"{name}={'null' if value is None else value}" for name, value in SLOW.items()]
    words += ["plan.allow=[local_updates]", f"topology={slow_link(tmp_path)}"]
    assert main(["plan", RUN, *words, "--what-if", "links.ib<->roce.bandwidth=100 Gb/s"]) == 0
    now, _, then = capsys.readouterr().out.partition("what if")
    assert ["on their own and meet" in text for text in (now, then)] == [True, False]
