"""The processes of a job that is played by a test."""

from holmesjax.plan.processes import Process


def process(number, stage, rank=0):
    return Process(
        number=number,
        name=f"c{stage}/n{number}",
        cluster=f"c{stage}",
        node=f"n{number}",
        stage=stage,
        rank=rank,
        devices=(number,),
        local_devices=(0,),
    )


PROCESSES = (process(0, 0), process(1, 0, 1), process(2, 1))  # two stages; the first has two
