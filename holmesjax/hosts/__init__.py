"""This host and its neighbours: NICs, NCCL, checks and measurements before there is a job."""
