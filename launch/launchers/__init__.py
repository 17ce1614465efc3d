"""Ways to start the processes of a job: on this machine, over SSH, under a scheduler."""
