"""Adds the toys to every process whose PYTHONPATH has this folder."""

from tests.toys import data, optimizer, schedule

for toy in (data, optimizer, schedule):
    toy.add()
