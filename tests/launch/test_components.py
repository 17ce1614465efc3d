"""Components of a job with many processes: each process is looked at a few times."""

from types import SimpleNamespace

from launch.launchers import components
from launch.launchers.components import Component
from launch.launchers.slurm import SlurmLauncher


class Counted:
    """A process that counts how often its node is asked for."""

    looks = 0
    cluster = "a"

    def __init__(self, number):
        self.number, self.devices = number, (number,)

    @property
    def node(self):
        Counted.looks += 1
        return f"a-{self.number // 8}"


def test_the_work_for_components_grows_with_the_processes_alone(monkeypatch):
    processes = [Counted(i) for i in range(160)]
    monkeypatch.setattr(components, "make_processes", lambda *_: processes)
    node = SimpleNamespace(device=SimpleNamespace(name="h100"))
    config = SimpleNamespace(
        distributed=SimpleNamespace(processes="device"), run=SimpleNamespace(rehearse=False)
    )
    topology = SimpleNamespace(node=lambda name: node, clusters=[SimpleNamespace(name="a")])
    job = SimpleNamespace(topology=topology, plan=None, config=config)
    [component] = components.make_components(job)
    assert (component.num_nodes, component.per_node, component.num_gpus) == (20, 8, 1)
    assert Counted.looks <= 5 * len(processes)


def test_slurm_finds_the_component_of_a_process_by_its_number():
    processes = tuple(SimpleNamespace(number=i) for i in range(4))
    launcher = object.__new__(SlurmLauncher)
    launcher._components = [
        Component(name=name, cluster=name, processes=members, num_nodes=1, num_gpus=0)
        for name, members in (("a", processes[:2]), ("b", processes[2:]))
    ]
    launcher._waiting = {}

    class Alone(SimpleNamespace):
        def __eq__(self, other):
            raise AssertionError("processes are compared")

        __hash__ = None

    launcher.start(SimpleNamespace(process=Alone(number=3)), events=None)
    assert launcher._waiting == {"b": {3}}
