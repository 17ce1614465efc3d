"""Whole runs with islands: what equals a run without them, resumes, data, and what is refused."""

import dataclasses
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from holmesjax import Trainer, job, job_description
from holmesjax.checkpoints import changed_settings, island_states, manifest, reading
from holmesjax.checkpoints.array_keys import flatten
from holmesjax.config import OuterConfig
from holmesjax.errors import HolmesError
from holmesjax.islands.apart import ApartPlacer
from holmesjax.islands.host_memory import HOST
from holmesjax.islands.runner import IslandsPlacer, IslandsRunner, step_of_island
from holmesjax.plan.outer_rule import owners, trained_sizes
from holmesjax.plan.plan import Plan
from holmesjax.planner.islands import island_config
from holmesjax.planner.islands_explained import describe_run, explain_run
from holmesjax.planner.planner import make_plan
from holmesjax.report import history, page
from holmesjax.runtime.prefetch import Step, Validation
from holmesjax.training_setup import read_batches
from holmesjax.units import show
from launch.__main__ import main
from tests.clusters import make_cluster, make_config, make_topology
from tests.diloco import diloco
from tests.priced_saves import assert_priced_as_written
from tests.small_runs import RUN, SMALL
from tests.versions import rows

BY_ISLAND = "data.mixture_by_island: shares "
ON_HOSTS = {"parallel.outer_memory": "host"}
ISLANDS = {"parallel.across": "local_updates", "parallel.every": 2}
SHARES = 5, 3


def are_on_hosts(states):
    """Whether all that these keep between meetings is in memory of hosts."""
    kept = [x for state in states for x in jax.tree.leaves(state.outer)]
    return kept and {x.sharding.memory_kind for x in kept} == {HOST}


def trainer(folder, **more):
    return Trainer(RUN, {**SMALL, "run.dir": str(folder), **more}, io.StringIO())


def saved(run_dir, step=5):
    """The digests of all arrays of a checkpoint."""
    arrays = manifest.at(manifest.folder_of(run_dir, step)).manifest["arrays"]
    return {name: facts["digest"] for name, facts in arrays.items()}


def test_one_island_that_meets_in_every_step_trains_as_a_run_without(tmp_path):
    one = {"topology": "configs/topologies/one_cpu.yaml"}
    plain_rule = {"parallel.outer": {"rate": 1.0, "momentum": 0.0}, "parallel.every": 1}
    trainer(tmp_path / "plain", **one).run()
    trainer(tmp_path / "island", **{**one, **ISLANDS, **plain_rule}).run()
    plain, island = saved(tmp_path / "plain"), saved(tmp_path / "island")
    assert [island[name] for name in plain if name.startswith("params.")] == [
        digest for name, digest in plain.items() if name.startswith("params.")
    ]
    assert {f"island_0.{name}": digest for name, digest in plain.items()}.items() <= island.items()


@pytest.mark.one_version
def test_unlike_parts_of_a_batch_weigh_as_much_as_they_have_tokens(tmp_path):
    """Islands that meet after each step of plain SGD take that of the whole batch."""
    sgd = {"optimizer.name": "sgd", "optimizer.beta1": 0.0, "optimizer.clip_norm": None}
    sgd |= {"optimizer.learning_rate": 0.5, "optimizer.weight_decay": 0.0}
    sgd |= {"model.num_layers": 1, "train.steps": 2, "train.eval_every": 2}
    plain_rule = {"parallel.outer": {"rate": 1.0, "momentum": 0.0}, "parallel.every": 1}
    shares = {"parallel.shares": list(SHARES)}
    plain = trainer(tmp_path / "plain", **sgd)
    islands = trainer(tmp_path / "islands", **{**sgd, **ISLANDS, **plain_rule, **shares})
    assert [island.global_batch for island in islands.job.plan.islands] == [10, 6]
    words = "islands take 10, 6 of 16 sequences"
    told = ["\n".join(job_description.describe(run.job)) for run in (plain, islands)]
    assert f"  shares    {words}, and" in told[1]
    assert not [text for text in told if "parallel.shares=speed" in text]
    for run in (plain, islands):
        run.run()
        assert (words in page._facts(run.job.plan, history.History(run.history))) == (
            run is islands
        )
    for names in ("loss", "val_loss", "learning_rate"):
        of_runs = ([x[names] for x in run.history if names in x] for run in (plain, islands))
        np.testing.assert_allclose(*of_runs, rtol=1e-5)
    found, expected = (arrays_of(tmp_path / name, 2) for name in ("islands", "plain"))
    for name in [name for name in expected if name.startswith("params.")]:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.one_version
def test_a_run_that_stops_between_meetings_goes_on_to_the_same_bits(tmp_path, capsys):
    """The steps meet after 2, 4 and 5; it stops after 3. Islands take unlike parts of a batch."""
    settings = {**ISLANDS, "train.eval_every": 4, "parallel.shares": list(SHARES)}
    whole = trainer(tmp_path / "whole", **settings)
    whole.run()
    cut = trainer(tmp_path / "cut", **settings)
    for _ in range(3):
        cut.step()
    assert len(cut.stages) == 2
    cut.close()
    between = saved(tmp_path / "cut", 3)
    table = "params.embed.token_VD"
    assert between[f"island_0.{table}"] != between[f"island_1.{table}"]
    assert_priced_as_written(tmp_path / "cut")
    shutil.copytree(tmp_path / "cut", tmp_path / "others")
    Trainer(tmp_path / "cut", stream=io.StringIO()).run()
    assert saved(tmp_path / "cut") == saved(tmp_path / "whole")
    ends = [run.history[-1] for run in (whole, cut)]
    assert [end["val_loss"] for end in ends] == [ends[0]["val_loss"]] * 2
    end = saved(tmp_path / "whole")  # after a meeting
    for name in [name for name in end if name.startswith("params.")]:
        assert end[name] == end[f"island_0.{name}"] == end[f"island_1.{name}"]
    assert main(["generate", str(tmp_path / "whole"), "--prompt", "a", "--max-tokens", "2"]) == 0
    capsys.readouterr()
    go_on_with_others(tmp_path / "others")


@pytest.mark.one_version
def test_a_run_that_stops_while_a_fragment_is_on_its_way_goes_on_to_the_same_bits(tmp_path):
    """The first of two fragments is sent after step 4, and lands after step 8.

    Everything meets after step 9, the last one. A run that trains longer then has nothing on its
    way, though a run of 13 steps would have the second fragment. The run that stops keeps the state
    of meetings in memory of the host.
    """
    stream = {"parallel.fragments": 2, "parallel.delay": 4, "parallel.blend": 0.75}
    steps = {"parallel.every": 8, "train.steps": 9, "train.eval_every": 8}
    settings = {**ISLANDS, **stream, **steps, "model.num_layers": 1}
    whole = trainer(tmp_path / "whole", **settings)
    cut = trainer(tmp_path / "cut", **settings, **ON_HOSTS)
    whole.run()
    for _ in range(5):
        cut.step()
        assert are_on_hosts(cut._loop.states)
    cut.close()
    again = Trainer(tmp_path / "cut", stream=io.StringIO())
    again.run()
    assert saved(tmp_path / "cut", 9) == saved(tmp_path / "whole", 9)
    assert [run.history[-2]["val_loss"] for run in (whole, again)] == [
        whole.history[-2]["val_loss"]
    ] * 2
    longer = {"train.steps": 13}
    Trainer(tmp_path / "whole", longer, io.StringIO()).run()
    cut = Trainer(tmp_path / "cut", longer, io.StringIO())
    cut.step()
    cut.close()
    Trainer(tmp_path / "cut", longer, io.StringIO()).run()
    assert saved(tmp_path / "cut", 13) == saved(tmp_path / "whole", 13)


@pytest.mark.parametrize("rule", rows({rule: rule for rule in ("noloco", "eager", "co2")}, 0))
def test_a_run_of_another_rule_goes_on_to_the_same_bits(tmp_path, rule):
    """It meets after 2, 4 and 5 steps, and stops after 3; then others go on, and lose no round.

    The run that stops keeps the state of meetings in memory of the host.
    """
    outer = {"rule": rule, "codec": "bfloat16"}
    settings = {**ISLANDS, "model.num_layers": 1, "parallel.outer": outer, "train.eval_every": 4}
    whole = trainer(tmp_path / "whole", **settings)
    cut = trainer(tmp_path / "cut", **settings, **ON_HOSTS)
    whole.run()
    for _ in range(3):
        cut.step()
        assert are_on_hosts(cut._loop.states)
    cut.close()
    assert_priced_as_written(tmp_path / "cut")
    shutil.copytree(tmp_path / "cut", tmp_path / "others")
    again = Trainer(tmp_path / "cut", stream=io.StringIO())
    again.run()
    assert saved(tmp_path / "cut") == saved(tmp_path / "whole")
    assert again.history[-1]["val_loss"] == whole.history[-1]["val_loss"]
    written = arrays_of(tmp_path / "others", 3)
    settings["parallel.outer"] = {"rule": "nesterov"}
    with trainer(tmp_path / "others", **settings) as others:
        begun = {name: np.asarray(x) for name, x in flatten(others.params).items()}
        said = "islands of another rule have written it; those here begin with the global weights"
        others.run()
    assert said in others._stream.getvalue()
    name = "embed.token_VD"
    mean_of = lambda what: np.mean(
        [written[f"island_{k}.{what}.{name}"] for k in (0, 1)], axis=0, dtype=np.float64
    )
    expected = mean_of("params")
    if rule != "noloco":  # what was sent after two steps is in the global weights
        is_eager = rule == "eager"
        old = mean_of("outer.own.start") if is_eager else written[f"outer.before.{name}"]
        assert np.abs(written[f"params.{name}"] - old).max() > 1e-4
        expected = expected + written[f"params.{name}"] - old
    np.testing.assert_allclose(begun[name], expected, rtol=0, atol=1e-6)
    if rule == "noloco":
        slow = [written[f"island_{k}.outer.own.start.{name}"] for k in (0, 1)]
        mean = np.mean(slow, axis=0, dtype=np.float64)
        np.testing.assert_allclose(written[f"params.{name}"], mean, rtol=0, atol=1e-7)


def go_on_with_others(folder):
    """A pipeline goes on where two islands were between meetings, and then one island does.

    The pipeline begins with the weights of a meeting, and with the mean of the moments.
    """
    islands = arrays_of(folder, 3)
    with trainer(folder, **{"train.steps": 4, "checkpoint.every": 1}) as one:  # or a failure hangs
        for name, x in flatten(one.params).items():
            own = [islands[f"island_{k}.params.{name}"] for k in (0, 1)]
            outer = islands[f"params.{name}"], islands[f"outer.momentum.{name}"]
            wide = [array.astype(np.float64) for array in outer]
            met = diloco(OuterConfig(), own, *wide, SHARES)[0]
            np.testing.assert_allclose(x, met, rtol=0, atol=1e-6)
        for name, x in flatten(one.opt_state).items():
            own = [islands[f"island_{k}.opt_state.{name}"] for k in (0, 1)]
            mean = own[0] if own[0].dtype == np.int32 else np.mean(own, axis=0, dtype=np.float64)
            np.testing.assert_allclose(x, mean, rtol=1e-6)
        one.run()
    said = one._stream.getvalue()
    for words in (
        "begin with the global weights, for which they meet once more",
        "the pipeline goes on with the mean of the moments of (ib), (roce)",
    ):
        assert words in said
    alone = {**ISLANDS, "parallel.islands": [["ib", "roce"]], "train.steps": 5}
    trainer(folder, **alone).run()
    assert "island_0.params.embed.token_VD" in saved(folder)


def arrays_of(run_dir, step):
    """All arrays of a checkpoint, by name."""
    checkpoint = manifest.at(manifest.folder_of(run_dir, step))
    shape = lambda own: jax.ShapeDtypeStruct(own["shape"], own["dtype"])
    shapes = {name: shape(facts) for name, facts in checkpoint.manifest["arrays"].items()}
    return reading.read_tree(checkpoint, shapes)


@pytest.mark.parametrize("odd", [None, "island_0.params.a", "island_1.params.b"])
def test_islands_are_between_meetings_where_one_has_other_weights(odd):
    names = [f"{where}params.{x}" for where in ("", "island_0.", "island_1.") for x in "ab"]
    arrays = {name: {"digest": name[-1] + "*" * (name == odd)} for name in names}
    checkpoint = SimpleNamespace(
        manifest={"arrays": arrays}, settings={"parallel": {"islands": [["x"], ["y"]]}}
    )
    assert island_states.is_between_meetings(checkpoint) == (odd is not None)


def test_who_waits_for_other_islands_says_so():
    """Before a process is said to save, or to train."""
    said = []
    noting = lambda name: lambda *args: said.append(name) or {}
    streaming = SimpleNamespace(begin=noting("begins"), settle=noting("settles"))
    runner = IslandsRunner({}, ("ib", "roce"), streaming, said.append)
    runner.begin([], 3)
    runner.settled([])
    waits = "the meeting of islands"
    assert said == [waits, "begins", "", waits, "settles", ""]


class Rows:
    """A placer that gives back which rows it was asked for."""

    def make(self, batches, what):
        if isinstance(what, Validation):
            return batches.validation(what.index)
        return batches.of_size(what.global_batch).train(what.first_sequence)


@pytest.mark.parametrize("shares, sizes", [((), [8, 8]), (SHARES, [10, 6])])
def test_islands_share_the_batches_of_a_run_without(shares, sizes):
    config = job.load(RUN, {**SMALL, "train.eval_every": 2, "train.eval_batches": 2}).config
    batches = read_batches(config)
    placer = IslandsPlacer({0: Rows(), 1: Rows()}, ("ib", "roce"), shares)
    for whats in ([Step(32, 16)], [Validation(0), Validation(1)]):
        whole = [Rows().make(batches, what) for what in whats]
        made = [placer.make(batches, what) for what in whats]
        parts = [part for inputs in made for part in inputs.parts.values()]
        of_first = [sizes[0]] * -(-32 // sizes[0])  # the first island validates
        assert [len(part.token_NL) for part in parts] == (of_first if whats[1:] else sizes)
        counts = [part.target_NL is None or (part.target_NL >= 0).all(axis=1) for part in parts]
        real = [part.token_NL[is_real] for part, is_real in zip(parts, counts, strict=True)]
        tokens = np.concatenate([rows.reshape(-1, rows.shape[-1]) for rows in real])
        np.testing.assert_array_equal(tokens, np.concatenate([rows.token_NL for rows in whole]))
        total = sum(rows.num_targets for rows in whole)
        assert sum(part.num_targets for part in parts) == total
        assert sum(inputs.num_targets for inputs in made) == total


def test_an_island_reads_the_same_of_its_own_mixture_wherever_it_is():
    """In one process with others, and in a job of its own."""
    topics = [{"name": name, "corpus": "python-stdlib"} for name in ("one", "other")]
    own = {"data.corpus": "mixture", "data.mixture": topics}
    own["data.mixture_by_island"] = {"roce": {"other": 1.0}}
    planned, names = job.load(RUN, {**SMALL, **ISLANDS, **own}), ("ib", "roce")
    batches = read_batches(planned.config)
    parts = IslandsPlacer({0: Rows(), 1: Rows()}, names).make(batches, Step(32, 16)).parts
    for k, part in parts.items():
        of_job = dataclasses.replace(batches, global_batch=8)
        [apart] = ApartPlacer(Rows(), k, names).make(of_job, Step(16, 8)).parts.values()
        whole = Rows().make(batches.of_island(k, names), Step(16, 8))
        np.testing.assert_array_equal(part.token_NL, whole.token_NL)
        np.testing.assert_array_equal(apart.token_NL, whole.token_NL)
    assert not np.array_equal(parts[0].token_NL, parts[1].token_NL)
    assert [step_of_island(batches, 32, names, k, [8, 8])[1].first_draw for k in (0, 1)] == [32, 40]
    unlike = [step_of_island(batches, 32, names, k, [12, 4])[1] for k in (0, 1)]
    assert unlike == [Step(24, 12, first_draw=32), Step(8, 4, first_draw=44)]
    kept = {"plan_hash": planned.plan.hash(), "settings": changed_settings.settings(planned)}
    found = manifest.Checkpoint(path=Path(), step=1, manifest=kept)
    assert not [*changed_settings.changes_since(found, planned)]
    kept["settings"]["parallel"]["islands"].reverse()  # they would read others' items
    said = [str(change) for change in changed_settings.changes_since(found, planned)]
    turns = 'data.mixture_by_island: islands [["roce"], ["ib"]] -> [["ib"], ["roce"]]'
    assert said[1:] == [turns]
    kept["settings"]["parallel"]["islands"].reverse()
    kept["settings"]["parallel"]["shares"] = [3, 1]
    said = [str(change) for change in changed_settings.changes_since(found, planned)]
    assert said == [f"{name}[3, 1] -> null" for name in ("parallel.shares: ", BY_ISLAND)]
    with pytest.raises(HolmesError, match=r"mixture_by_island: names no island\n  found: rose"):
        job.load(RUN, {**SMALL, **ISLANDS, **own, "data.mixture_by_island": {"rose": {"one": 1.0}}})


def test_the_plan_says_islands_bytes_and_seconds():
    planned = job.load(RUN, {**SMALL, **ISLANDS})
    plan = planned.plan
    assert Plan.from_yaml(plan.to_yaml()) == Plan.from_json(plan.to_json()) == plan
    assert [stage.devices for stage in plan.stages] == [(0,), (1,)]
    text = "\n".join(job_description.describe(planned))
    assert "parallel.shares=speed" not in text
    fast, slow = plan.islands
    unlike = dataclasses.replace(slow, step_time_s=3 * fast.step_time_s)
    uneven = dataclasses.replace(plan, islands=(fast, unlike))
    told = "\n".join(job_description.describe(dataclasses.replace(planned, plan=uneven)))
    best_s = fast.step_time_s * max(0.75 / 0.5, 3 * 0.25 / 0.5)  # of the batch, which is 16
    assert f"            parallel.shares=speed may take about {show(best_s, 's')}" in told
    for words in ("2 islands, which train on their own and meet every 2 steps", "  meeting   isl"):
        assert words in text
    link = planned.topology.boundary_link("ib-0", "roce-0")
    sizes = trained_sizes(planned.config.model)
    owner = owners(sizes, 2)
    owned = [4 * sum(n for name, n in sizes.items() if owner[name] == k) for k in range(2)]
    way_s = max(owned) / link.bandwidth_bytes_per_s + link.latency_s
    least_s = 2 * way_s  # there, and as long back
    assert plan.meeting.seconds == pytest.approx(least_s)
    slowest_s = max(island.step_time_s for island in plan.islands)
    assert plan.step_time_s == pytest.approx(slowest_s + least_s / 2)
    # On hosts it is beside what steps have, unless it is more; and what streams is on devices.
    at_hosts = {**SMALL, **ISLANDS, **ON_HOSTS}
    hosted = job.load(RUN, at_hosts)
    assert [stage.memory_bytes["outer"] for stage in hosted.plan.stages] == [0.0, 0.0]
    assert "hosts       56.6 KiB, 56.6 KiB of each" in "\n".join(job_description.describe(hosted))
    passing = {"parallel.fragments": 2, "parallel.delay": 1}
    with_hosts, without = (
        [s.memory_bytes["outer"] for s in job.load(RUN, {**first, **passing}).plan.stages]
        for first in (at_hosts, {**SMALL, **ISLANDS})
    )
    assert all(0.0 < a < b for a, b in zip(with_hosts, without, strict=True))
    # What validations need: the first island keeps all global weights where it has others.
    blended = {"parallel.blend": 0.5, "train.eval_every": 2}
    stages = job.load(RUN, {**SMALL, **ISLANDS, **blended}).plan.stages
    outer, kept = ([s.memory_bytes["outer"] for s in islands] for islands in (plan.stages, stages))
    assert kept == [outer[0] + plan.meeting.bytes[0], outer[1]]
    with pytest.raises(HolmesError, match="meeting must have the bytes of each island"):
        Plan.from_json(dataclasses.replace(plan, meeting=None).to_json())


def test_the_plan_prices_what_steps_hide():
    """Each way of a fragment hides behind half of its delay, and no more than there is."""
    streaming = {**SMALL, **ISLANDS, "parallel.every": 12, "parallel.fragments": 2}
    plain = job.load(RUN, streaming).plan
    for delay in (1, 4):
        settings = {**streaming, "parallel.delay": delay}
        planned = job.load(RUN, settings)
        meeting, alone_s = planned.plan.meeting, planned.plan.islands[0].step_time_s
        assert meeting.seconds == plain.meeting.seconds > 0
        assert meeting.bytes == plain.meeting.bytes
        there_back = ((delay + 1) // 2, delay // 2)
        least = min(meeting.seconds, 2 * sum(there_back) * alone_s)
        assert 0 < meeting.hidden_s <= least
        assert Plan.from_json(planned.plan.to_json()) == planned.plan
    assert meeting.exposed_s == pytest.approx(0.0, abs=1e-9 + meeting.seconds / 100)
    found = explain_run(planned.config, planned.topology).ways
    assert found[0].hidden_s == meeting.hidden_s / 12
    assert found[1].exposed_s == meeting.seconds / 12
    assert "fragments, 4 late" in found[0].what


def test_the_plan_says_each_rule():
    """Its memory, bytes and seconds; and an odd number of islands says who sits out."""
    two = lambda **outer: job.load(RUN, {**SMALL, **ISLANDS, "parallel.outer": outer})
    plain, pairs, late = two(), two(rule="noloco"), two(rule="co2", codec="bfloat16")
    numbers = sum(trained_sizes(plain.config.model).values())
    assert plain.plan.hash() == job.load(RUN, {**SMALL, **ISLANDS}).plan.hash()
    memory = lambda planned: sum(s.memory_bytes["outer"] for s in planned.plan.stages)
    assert memory(plain) == 8 * numbers
    assert memory(pairs) == 4 * numbers + 2 * (8 + 12 + 12) * numbers
    assert memory(late) == 12 * numbers + 2 * (4 + 2 * 2) * numbers
    assert pairs.plan.meeting.bytes == (8 * numbers,) * 2
    assert sum(late.plan.meeting.bytes) == sum(plain.plan.meeting.bytes) / 2
    link = pairs.topology.boundary_link("ib-0", "roce-0")
    one_way_s = 8 * numbers / link.bandwidth_bytes_per_s + link.latency_s
    assert pairs.plan.meeting.seconds == pytest.approx(one_way_s)
    assert late.plan.meeting.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert Plan.from_json(late.plan.to_json()) == late.plan
    text = "\n".join(job_description.describe(late))
    assert "as bfloat16 by the rule co2" in text
    assert "random ones meet, and none of more than two" in "\n".join(
        job_description.describe(pairs)
    )


def test_an_island_has_room_for_its_meetings_where_all_layers_compute_again():
    """Without meetings fewer layers would, as many as fill the memory."""
    clusters = [make_cluster(name, "infiniband", (1,), memory_gib=5.0) for name in ("a", "b")]
    parallel = {"across": "local_updates", "every": 10, "microbatches": 1}
    model = {"num_layers": 8, "width": 1024, "context_length": 1024}
    config = make_config(model=model, parallel=parallel, train={"global_batch": 16})
    plan = make_plan(config, make_topology(*clusters))
    assert [island.recomputed_layers for island in plan.islands] == [(), ()]
    assert {island.activation_checkpointing for island in plan.islands} == {"full"}
    assert make_plan(island_config(config, 8), make_topology(clusters[0])).recomputed_layers == (1,)


def test_islands_are_explained_beside_a_pipeline():
    """The ways are what plans of their own say."""
    planned = job.load(RUN, {**SMALL, **ISLANDS})
    found = explain_run(planned.config, planned.topology)
    own, often, *_, pipeline = found.ways
    plans = {
        own: planned.plan,
        often: job.load(RUN, {**SMALL, **ISLANDS, "parallel.every": 1}).plan,
        pipeline: job.load(RUN, SMALL).plan,
    }
    for way, plan in plans.items():
        assert way.step_s == pytest.approx(plan.step_time_s)
    assert own.sent_bytes == max(planned.plan.meeting.bytes) / 2 == often.sent_bytes / 2
    assert pipeline.sent_bytes == plans[pipeline].boundary_bytes * plans[pipeline].microbatches
    islands = planned.plan.islands
    steps_s = [explanation.step_s for explanation in found.islands]
    assert steps_s == pytest.approx([island.step_time_s for island in islands])
    text = "\n".join(describe_run(found))
    for words in ("islands that meet in every step", "a pipeline over the links", "island 1: roce"):
        assert words in text


REFUSED = {
    "parallel.islands: names no cluster": {"parallel.islands": [["ib"], ["pluto"]]},
    "parallel.islands: must have each cluster once": {"parallel.islands": [["ib"], ["ib"]]},
    "parallel.clusters: is for one pipeline": {"parallel.clusters": ["ib", "roce"]},
    "parallel.every: is only for": {"parallel.across": "pipeline"},
    "train.global_batch: must be a multiple of 2": {"train.global_batch": 7},
    "train.eval_every: must be a multiple of parallel.every = 2": {"train.eval_every": 3},
    "train.rampup: islands have": {"train.rampup": [{"steps": 2, "global_batch": 8}]},
    "train.spike_policy: islands cannot": {"train.spike_policy": "skip"},
    "train.param_dtype: must be float32": {"train.param_dtype": "bfloat16"},
    "optimizer.ema_decay: islands keep no": {"optimizer.ema_decay": 0.9},
    "parallel.fragments: must divide parallel.every = 2": {"parallel.fragments": 3},
    "parallel.fragments: must be at most 4": {"parallel.fragments": 5, "parallel.every": 5},
    "parallel.delay: must be at most 1": {"parallel.fragments": 2, "parallel.delay": 2},
    "parallel.blend: is only for": {"parallel.across": "pipeline", "parallel.blend": 0.5},
    "parallel.blend": {"parallel.blend": 0.0},
    "parallel.outer.momentum": {"parallel.outer": {"momentum": 1.0}},
    "parallel.outer.clip: is only for": {"parallel.outer": {"clip": 0.5}},
    "parallel.delay: cannot be set with parallel.outer.rule: eager": {
        "parallel.outer": {"rule": "eager"},
        "parallel.delay": 1,
    },
    "parallel.fragments: cannot be set": {
        "parallel.outer": {"rule": "noloco"},
        "parallel.fragments": 2,
    },
    "parallel.outer.momentum: must be less than": {
        "parallel.outer": {"rule": "noloco", "momentum": 0.8},
    },
    "parallel.outer.pull: must lie between": {"parallel.outer": {"rule": "noloco", "pull": 1.6}},
    "parallel.shares: must have a number for each of the 2": {"parallel.shares": [2, 1, 1]},
    "train.global_batch: must be a multiple of 3": {"parallel.shares": [2, 1]},
    "parallel.shares: must give each island a multiple of 4 sequences": {
        "parallel.shares": [5, 3],
        "parallel.microbatches": 4,
    },
    "parallel.shares[0]: must be at least 1": {"parallel.shares": [0, 1]},
    "parallel.shares: must be one of speed": {"parallel.shares": "fast"},
    "parallel.shares: cannot be set with parallel.outer.rule: noloco": {
        "parallel.shares": [3, 1],
        "parallel.outer": {"rule": "noloco"},
    },
    "parallel.outer_memory: is only for parallel.meet: direct": {
        **ON_HOSTS,
        "parallel.meet": "mailbox",
    },
    "parallel.shares: is only for parallel.meet: direct": {
        "parallel.shares": [3, 1],
        "parallel.meet": "mailbox",
    },
    "parallel.shares: must be speed with parallel.across: auto": {
        "parallel.shares": [3, 1],
        "parallel.across": "auto",
    },
    "parallel.outer.codec": {"parallel.outer": {"codec": "int3"}},
    "island 0: cannot share the token table": {
        "model.tied_embeddings": True,
        "parallel.stages": 2,
        "topology": "configs/topologies/ib_roce.yaml",
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_islands_cannot_have_is_refused(message):
    with pytest.raises(HolmesError) as caught:
        job.load(RUN, {**SMALL, **ISLANDS, **REFUSED[message]})
    where, _, problem = message.partition(": ")
    assert where in str(caught.value)
    assert problem in str(caught.value)
