"""Islands that are jobs of their own: what lands on one, its data, and what is refused."""

import contextlib
import functools
import io
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holmesjax import Trainer, job, job_description
from holmesjax.checkpoints import manifest
from holmesjax.checkpoints.array_keys import flatten
from holmesjax.config import OuterConfig, PlaceConfig
from holmesjax.data.batches import Batches
from holmesjax.errors import HolmesError, PeerError
from holmesjax.islands import apart, mailbox_records as records, rejoining
from holmesjax.islands.apart import ApartPlacer, IslandApart, _Sent
from holmesjax.islands.landing import RoundStanding
from holmesjax.islands.mailbox import Arrived, Mailbox
from holmesjax.islands.mailbox_claim import claim, claim_data
from holmesjax.islands.mailbox_places import Counted, Folder
from holmesjax.islands.mailbox_records import IslandProgress, Merged
from holmesjax.islands.mailbox_seat import MailboxSeat, Rules
from holmesjax.planner.island_alone import alone
from holmesjax.report import island_rounds, page
from holmesjax.runtime.prefetch import Inputs, Step
from tests.diloco import diloco
from tests.jobs import HANG_S, RunningJob, compiling_once
from tests.priced_saves import assert_priced_as_written
from tests.small_runs import RUN, SMALL

MAILBOX = {"parallel.across": "local_updates", "parallel.meet": "mailbox", "parallel.every": 2}
TOKENS = 8 * 32  # of a step of one of two islands
LIMIT_S = 60.0


def trainer(folder, **more):
    return Trainer(RUN, {**SMALL, "run.dir": str(folder), **MAILBOX, **more}, io.StringIO())


def saved(run_dir):
    """The digests of all arrays of the newest checkpoint."""
    arrays = manifest.find(run_dir)[0].manifest["arrays"]
    return {name: facts["digest"] for name, facts in arrays.items()}


def test_one_island_with_a_plain_rule_trains_as_a_run_without(tmp_path):
    """Also over an interruption between two rounds, and with a learning rate that changes."""
    one = {"topology": "configs/topologies/one_cpu.yaml"}
    rule = {"parallel.outer": {"rate": 1.0, "momentum": 0.0}, "parallel.island": "cpu"}
    plain = Trainer(RUN, {**SMALL, **one, "run.dir": str(tmp_path / "plain")}, io.StringIO())
    plain.run()
    cut = trainer(tmp_path / "apart", **one, **rule)
    for _ in range(3):
        cut.step()
    cut.close()
    assert_priced_as_written(tmp_path / "apart/cpu")
    again = Trainer(tmp_path / "apart/cpu", stream=io.StringIO())
    again.run()
    assert again.finished
    own, island = saved(tmp_path / "plain"), saved(tmp_path / "apart/cpu")
    assert {name: x for name, x in island.items() if name.startswith("params.")} == {
        name: x for name, x in own.items() if name.startswith("params.")
    }
    assert {f"island_0.{name}": digest for name, digest in own.items()}.items() <= island.items()
    for name in ("loss", "learning_rate"):
        assert [x[name] for x in again.history] == [x[name] for x in plain.history]


class OtherIsland:
    """The second of two islands, whose weights a test gives."""

    def __init__(self, folder, names):
        seat = MailboxSeat(
            order=("ib", "roce"), number=1, part=0, parts=1, names=tuple(names), writes=True
        )
        rules = Rules(outer=OuterConfig(), quorum=2, grace_s=0.0, lease_s=0.5)
        self.box = Mailbox(Counted(Folder(folder / "mailbox")), seat, rules, folder, print)

    def send(self, number, weights, tokens):
        self.box.send(number, IslandProgress(number, number, 8 * number, tokens), weights.items)
        self.box.turn()


def host(trainer, name):
    """The weights of an island, or the global ones that it knows."""
    states = trainer._loop.states
    trees = [state.params if name == "params" else state.outer.weights for state in states]
    return {key: np.array(x) for tree in trees for key, x in flatten(tree).items()}


def test_what_lands_is_the_global_weights_and_the_change_since(tmp_path):
    """The island sends after step 2, and the round lands behind step 3; it is without it after 5.

    The learning rate is at the tokens of both.
    """
    with trainer(tmp_path, **{"parallel.island": "ib", "parallel.quorum": 2}) as island:
        first, runner = host(island, "params"), island._loop.runner
        other = OtherIsland(tmp_path, first)
        island.step()
        island.step()
        sent = host(island, "params")
        theirs = {name: x + np.float32(0.01) for name, x in sent.items()}
        other.send(1, theirs, tokens=5 * TOKENS)
        island.step()
        now = host(island, "params")
        runner._mailbox.record(1, LIMIT_S)
        runner.agree(runner.news())
        landed = runner.settled(island._loop.states)
        island._loop.states = landed
        new, known = host(island, "params"), host(island, "outer")
        for name, x in first.items():
            mean = np.average([sent[name], theirs[name]], axis=0, weights=[2, 5]).astype(np.float64)
            expected, _ = diloco(OuterConfig(), [mean], x.astype(np.float64), 0 * x)
            np.testing.assert_allclose(known[name], expected, rtol=0, atol=1e-6)
            change = now[name].astype(np.float64) - sent[name]
            np.testing.assert_allclose(new[name], expected + change, rtol=0, atol=1e-6)
        # Seven half steps are three whole ones, and then its own that is not merged.
        opt_state = landed[0].opt_state
        assert (int(opt_state.updates), int(opt_state.missed)) == (4, 4 - 3)
        island.step()
        assert runner._sent is None
        island.stop()


def test_an_island_that_comes_back_goes_on_with_the_newest_weights(tmp_path):
    """Its checkpoint is of step 3. What it has sent after step 4 is merged when it is killed."""
    settings = {"parallel.island": "ib", "train.steps": 40, "checkpoint.every": 3}
    with trainer(tmp_path, **settings) as island:
        for _ in range(5):
            island.step()
            wait_for_the_mailbox(island)
        before = island._loop.runner._mailbox._newest
        assert before.known["ib"].step == 4
        island._abandon()
    with Trainer(tmp_path / "ib", stream=io.StringIO()) as again:
        again.step()
        text = again._stream.getvalue()
        assert "leaves out 8 sequences behind step 3 (the global weights have them)" in text
        own, base = host(again, "params"), host(again, "outer")
        assert again._loop.runner.round == before.round
        opt_state = again._loop.states[0].opt_state
        assert int(opt_state.updates) - int(opt_state.missed) == 4
        # One step of Adam changes no number by much more than the learning rate.
        assert max(np.abs(own[name] - base[name]).max() for name in own) < 0.01
        again._abandon()


class Untouched:
    """A mailbox of which nothing is asked."""


def scalar(x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.device_put(np.float32(x), NamedSharding(mesh, PartitionSpec()))


def rejoined(monkeypatch, *, sent_before=None, standing, sent_round, sent_step):
    """An island of one number that has gone back to a checkpoint with W = 5 and G3 = 3."""
    place = PlaceConfig(names=("a", "b"), number=0, steps=1000)
    inner = SimpleNamespace(runner=SimpleNamespace(placer=None))
    common = {"every": 9, "grace_s": 1.0, "step_tokens": 1, "last": 1000, "limit_s": 1.0}
    island = IslandApart(
        inner, place, **common, mailbox=Untouched(), own_sent=None, consumed=lambda step: step
    )
    island._done = island._begun = 36
    island._standing, island._sent_before = standing, sent_before and {"x": sent_before}
    island._sent = _Sent(sent_round, sent_step, 36, {"x": scalar(5.0)})
    monkeypatch.setattr(apart, "params_of", lambda states: {"x": states[0].params["x"]})
    monkeypatch.setattr(apart, "global_weights_of", lambda states: states[0].outer)
    monkeypatch.setattr(apart, "with_weights", lambda s, x: replace(s, params=x))
    monkeypatch.setattr(apart, "with_updates", lambda state, change: state)
    monkeypatch.setattr(apart, "like", lambda tree, new: new)
    monkeypatch.setattr(apart, "Outer", lambda weights, momentum: weights)
    return island, [State({"x": scalar(5.0)}, {"x": scalar(3.0)})]


@dataclass(frozen=True)
class State:
    """The weights of an island, and the global ones that it knows."""

    params: dict
    outer: dict


def arrived(number, weights, known):
    record = Merged(
        round=number, tokens=4, islands={"a": 1}, known={"a": known}, sessions={}, by="b",
        file="", momentum_file="", weights={}, momentum={},
    )  # fmt: skip
    return Arrived(record, {"x": np.float32(weights)})


@pytest.mark.parametrize(
    ("known", "sent_before", "landed_4"),
    [
        (IslandProgress(3, 30, 0, 1), None, 5 + (10 - 3)),  # nothing of it was merged since
        (IslandProgress(4, 34, 0, 1), 4.0, 5 + (10 - 4)),  # what was on its way then
        (IslandProgress(4, 35, 0, 1), 4.0, 10),  # more
        (IslandProgress(2, 34, 0, 1), 4.0, 5 + (10 - 3)),  # the step of another round
    ],
)
def test_what_was_on_its_way_when_an_island_was_killed_counts_once(
    monkeypatch, known, sent_before, landed_4
):
    """Round 4 lands, and round 5 has what the job before has sent: the steps since stay alone."""
    island, states = rejoined(
        monkeypatch,
        sent_before=sent_before and scalar(sent_before),
        standing=RoundStanding(3, 30, 4, 34),
        sent_round=5,
        sent_step=40,
    )
    states = island._land(states, arrived(4, 10.0, known))
    assert float(states[0].params["x"]) == landed_4
    states = [replace(states[0], params={"x": states[0].params["x"] + 0.5})]  # a step
    island._done += 1
    states = island._land(states, arrived(5, 20.0, IslandProgress(5, 40, 0, 1)))
    assert (float(states[0].params["x"]), island._sent, island._counted) == (20.5, None, 36)


def test_a_step_of_another_round_is_not_what_was_sent(monkeypatch):
    """A job that went back has sent after the same step before: that is no answer to this one."""
    island, states = rejoined(
        monkeypatch, standing=RoundStanding(3, 30, -1, -1), sent_round=5, sent_step=40
    )
    island._rejoins = False
    states = island._land(states, arrived(5, 20.0, IslandProgress(4, 40, 0, 1)))
    assert float(states[0].params["x"]) == 5 + (20 - 3)
    assert island._sent is None


def wait_for_the_mailbox(island):
    """Until what the island has sent is merged and has come back, so that it lands next."""
    runner, end_s = island._loop.runner, time.monotonic() + LIMIT_S
    while runner._sent and runner.news().arrived < runner._sent.round:
        assert time.monotonic() < end_s
        time.sleep(0.02)


class Noted:
    """A placer that notes which sequences it makes."""

    def make(self, batches, what):
        size = getattr(what, "global_batch", batches.global_batch)
        first = what.first_sequence if isinstance(what, Step) else what.index * size
        return Inputs(num_targets=size, microbatches={0: list(range(first, first + size))})


def test_islands_share_the_order_of_the_data_and_have_nothing_in_common():
    """However many steps each takes. A validation has the sequences of the run without islands."""
    batches = Batches.__new__(Batches)
    data = SimpleNamespace(train=None)  # no mixture
    for name, value in {"global_batch": 4, "num_validation": 2, "data": data}.items():
        object.__setattr__(batches, name, value)
    steps, names = {0: 6, 1: 2, 2: 3}, ("a", "b", "c")
    seen = [
        sequence
        for k, count in steps.items()
        for n in range(count)
        for part in ApartPlacer(Noted(), k, names).make(batches, Step(4 * n, 4)).parts.values()
        for sequence in part.microbatches[0]
    ]
    assert len(seen) == len(set(seen)) == 4 * sum(steps.values())
    assert set(range(12 * min(steps.values()))) <= set(seen)


def refused(**settings):
    with pytest.raises(HolmesError) as error:
        job.load(RUN, {**SMALL, **MAILBOX, **settings})
    return str(error.value)


def test_what_cannot_be_is_refused(tmp_path):
    assert "parallel.island: names no island\n  found: rose" in refused(
        **{"parallel.island": "rose"}
    )
    assert "parallel.quorum: must be at most 2" in refused(**{"parallel.quorum": 3})
    assert "parallel.mailbox: is a URL that names no folder" in refused(
        **{"parallel.mailbox": "s3://bucket"}
    )
    assert "parallel.delay: is only for parallel.meet: direct" in refused(**{"parallel.delay": 1})
    assert "parallel.meet: is only for islands" in refused(
        **{"parallel.across": "pipeline", "parallel.every": None}
    )
    assert "parallel.quorum: is only for parallel.meet: mailbox" in refused(
        **{"parallel.meet": "direct", "parallel.quorum": 1}
    )
    with pytest.raises(HolmesError, match="start the others likewise"):
        trainer(tmp_path).run()
    (tmp_path / "mailbox").write_text("in the way")
    with pytest.raises(HolmesError, match="mailbox") as error:
        trainer(tmp_path, **{"parallel.island": "ib"}).run()
    assert not isinstance(error.value, PeerError)


def test_jobs_of_islands_with_unlike_settings_are_refused_by_name(tmp_path):
    """A job that goes on is compared, too; what islands have of their own is not."""

    def config(**more):
        settings = {**SMALL, **MAILBOX, "parallel.mailbox": str(tmp_path / "box")}
        return job.load(RUN, {**settings, "parallel.island": "ib", **more}).config

    sets = [{"name": "more", "corpus": "python-stdlib"}]
    own = {"parallel.island": "roce", "parallel.every": 3, "data.validation": sets}
    own |= {"parallel.quorum": 2, "optimizer.learning_rate": 0.5}
    rejoining.place_of(config())
    for like in (config(), config(**own)):
        rejoining.place_of(like)
    unlike = {
        "train.steps": SMALL["train.steps"] + 1,
        "data.validation_fraction": 0.5,
        "data.documents": "mask",
        "model.width": 64,
    }
    path = tmp_path / "box" / records.RUN  # as an earlier version wrote it, whose islands had none
    content = records.opened(path.read_bytes(), records.RUN)
    del content["data.mixture_by_island"]
    path.write_bytes(records.sealed(content))
    place = rejoining.place_of(config())
    with pytest.raises(HolmesError, match="mixture_by_island: None, not"):
        claim(place, {**content, "data.mixture_by_island": {"ib": {"one": 1.0}}}, "box")
    for name, value in unlike.items():
        with pytest.raises(HolmesError, match="mailbox of another run") as error:
            rejoining.place_of(config(**own, **{name: value}))
        assert f"found: {name}: " in str(error.value)
        assert str(error.value).count(", not ") == 1


def test_islands_with_other_files_under_one_name_are_refused(tmp_path):
    """Each start is compared; sets of `data.validation` are of one island alone."""
    place = Counted(Folder(tmp_path))
    digests = {"train": "1" * 64, "validation": "2" * 64, "order": "3" * 64}
    files = {"a.txt": "4" * 64, "b.txt": "5" * 64, "c.txt": "6" * 64}
    data = SimpleNamespace(files={f"corpus: {k}": x for k, x in files.items()} | {"own: a": "7"})
    batches = SimpleNamespace(digests=lambda: {**digests, "validation set own": "8"}, data=data)
    assert rejoining.shared_data(batches, ["own"]) == (digests, files)
    for _ in range(2):
        claim_data(place, digests, files)
    other = {"a.txt": files["a.txt"], "b.txt": "9" * 64, "d.txt": "0" * 64}
    with pytest.raises(HolmesError) as error:
        claim_data(place, {**digests, "train": "9" * 64}, other)
    both = "b.txt: SHA-256 555555555555, and SHA-256 999999999999 here; "
    both += (
        "c.txt: SHA-256 666666666666, and missing here; d.txt: missing, and SHA-256 000000000000"
    )
    for words in ("other data (train)", both, "data.paths"):
        assert words in str(error.value)
    with pytest.raises(HolmesError, match="in another order"):
        claim_data(place, {**digests, "order": "9" * 64}, files)
    damaged = tmp_path / "data.json"
    damaged.write_bytes(b"cut")
    with pytest.raises(HolmesError, match="has a damaged record of its data"):
        claim_data(place, {**digests, "train": "9" * 64}, other)
    damaged.unlink()  # as the message says
    claim_data(place, digests, files)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_job_of_an_island_has_its_part(tmp_path):
    whole = job.load(RUN, {**SMALL, **MAILBOX})
    part = job.load(RUN, {**SMALL, **MAILBOX, "parallel.island": "roce"})
    train = part.config.train
    assert (train.steps, train.global_batch) == (2 * whole.config.train.steps, 8)
    assert [cluster.name for cluster in part.topology.clusters] == ["roce"]
    assert part.config.run.dir.endswith("/roce")
    assert part.config.parallel.mailbox == os.path.abspath(f"{whole.config.run.dir}/mailbox")
    assert alone(part.config, part.topology) == (part.config, part.topology)
    lines = "\n".join(job_description.describe(part))
    assert "in a round each sends" in lines
    assert "who merges sends" in lines


def test_an_island_is_stopped_and_one_is_killed_and_both_end_with_the_same_weights(tmp_path):
    """Real processes: the second goes on alone, is killed, and comes back; then the first goes on.

    It was killed before its first checkpoint, so it begins with the weights of the mailbox.
    """
    start = functools.partial(start_island, tmp_path, "checkpoint.every=1000")
    with start(name="ib") as stopped, start(name="roce") as killed:
        stopped.until("step   5/")
        stopped.process.send_signal(signal.SIGSTOP)
        end_s = time.monotonic() + HANG_S
        rounds = lambda: island_rounds.read(tmp_path / "roce")
        while not (landed := rounds()) or "roce" not in landed.tokens:  # its own data are merged
            assert time.monotonic() < end_s
            time.sleep(0.05)
        killed.process.kill()
        killed.process.wait()
        stopped.process.send_signal(signal.SIGCONT)
        with start(name="roce") as again:
            assert again.end() == 0, again.output
        assert stopped.end() == 0, stopped.output
    assert "(the global weights have them)" in again.output
    assert_same_end(tmp_path)


def start_island(tmp_path, *more, name):
    """The job of one of two islands, in a process of its own."""
    settings = [f"{name}={value}" for name, value in (SMALL | MAILBOX).items() if value is not None]
    words = [RUN, *settings, f"run.dir={tmp_path}", "train.steps=120", "train.log_every_s=0"]
    words += ["distributed.heartbeat_timeout_s=2", "parallel.grace_s=1", *more]
    words += ["parallel.tensor=1", "parallel.schedule=1f1b", "parallel.every=5"]
    return RunningJob(*words, f"parallel.island={name}", env=compiling_once(tmp_path))


def assert_same_end(tmp_path):
    """Both islands have the same global weights, and have them for their own."""
    ends = []
    for name in ("ib", "roce"):
        arrays = manifest.find(tmp_path / name)[0].manifest["arrays"]
        params = {key: x["digest"] for key, x in arrays.items() if key.startswith("params.")}
        assert params == {key: arrays[f"island_0.{key}"]["digest"] for key in params}
        ends.append(params)
    assert ends[0] == ends[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_islands_fail_at_random_moments_and_both_end_with_the_same_weights(tmp_path, seed):
    """Real processes: killed and started again, stopped, or without a mailbox for seconds."""
    rng, box = random.Random(seed), tmp_path / "mailbox"
    names, saves = ("ib", "roce"), "checkpoint.every=20"
    start = functools.partial(start_island, tmp_path, saves, "train.steps=400")
    with contextlib.ExitStack() as stack:
        jobs = {name: stack.enter_context(start(name=name)) for name in names}
        for running in jobs.values():
            running.until("step  10/")
        for _ in range(4):
            time.sleep(rng.uniform(0.0, 2.0))
            name, fault = rng.choice(names), rng.choice(["kill", "stop", "no mailbox"])
            process, pause_s = jobs[name].process, rng.uniform(0.5, 6.0)
            if process.poll() is not None:
                break
            if fault == "kill":
                process.kill()
                process.wait()
                time.sleep(pause_s / 2)
                jobs[name] = stack.enter_context(start(name=name))
            elif fault == "stop":
                process.send_signal(signal.SIGSTOP)
                time.sleep(pause_s)
                process.send_signal(signal.SIGCONT)
            else:
                box.rename(tmp_path / "away")
                box.write_text("in the way")
                time.sleep(pause_s)
                box.unlink()
                (tmp_path / "away").rename(box)
        for running in jobs.values():
            assert running.end() == 0, running.output
    assert_same_end(tmp_path)


def test_the_report_has_the_rounds_and_the_events(tmp_path):
    lines = [
        '{"round": 0, "tokens": 0, "islands": {}, "by": "ib", "is_merged": false}',
        '{"round": 1, "tokens": 9, "islands": {"ib": 5, "roce": 4}, "by": "ib", "is_merged": true}',
        '{"event": "round 2 has no quorum: ib sent, of 2"}',
        '{"round": 2, "tokens": 12, "islands": {"roce": 3}, "by": "roce", "is_merged": false}',
        '{"round": 2, "tokens": 12, "islands": {"roce": 3}, "by": "roce", "is_merged": false}',
        '{"round": 3, "tok',
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(lines))
    found = island_rounds.read(tmp_path)
    assert found == (2, 1, {"ib": 5, "roce": 7}, ("round 2 has no quorum: ib sent, of 2",))
    assert island_rounds.read(tmp_path / "nowhere") is None
    [section] = page._rounds_section(found)
    assert "2 rounds of the mailbox landed, 1 of them merged without this island" in section.text
